"""Other libraries' models, run through ``attention()``. Each subpackage needs its library."""
