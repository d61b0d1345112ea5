"""Data only: routing policies, parity matrices and benchmark suites (TOML)."""
