"""csa-dispatch: one ``attention()`` call for compressed sparse attention, on any machine."""

from .api import attention
from .backend import Availability, Backend, Operation
from .call import Call, Gradients, Kind, TokenBounds, token_bounds
from .call_spec import CallSpec
from .capabilities import ANY, FALSE, Allowed, Between, Capabilities, Claims, OneOf
from .compressor_call import (
    CompressorCall,
    CompressorCapabilities,
    CompressorNeeds,
    CompressorSpec,
    EntryTable,
    entry_table,
)
from .explain import describe_call, explain
from .forcing import use_backend
from .indexer_call import IndexerCall, IndexerCapabilities, IndexerSpec, visible_entries
from .plan import Plan, resolve
from .policy import Policy, load_policy, use_policy
from .reasons import BackendRefused, Reason
from .receipts import Receipt, record_receipts, report, reset_report
from .recompute import enable_autograd, plain_dispatch
from .registry import backends, register_backend, unregister_backend
from .routing import Decision, FallbackWarning
from .settings import reload_settings
from .slot_table import SlotLayout, dense_slots_bounded, slot_layout, slot_rows

__version__ = "0.1.0"

__all__ = [
    "ANY",
    "FALSE",
    "Allowed",
    "Availability",
    "Backend",
    "BackendRefused",
    "Between",
    "Call",
    "CallSpec",
    "Capabilities",
    "Claims",
    "CompressorCall",
    "CompressorCapabilities",
    "CompressorNeeds",
    "CompressorSpec",
    "Decision",
    "EntryTable",
    "FallbackWarning",
    "Gradients",
    "IndexerCall",
    "IndexerCapabilities",
    "IndexerSpec",
    "Kind",
    "OneOf",
    "Operation",
    "Plan",
    "Policy",
    "Reason",
    "Receipt",
    "SlotLayout",
    "TokenBounds",
    "attention",
    "backends",
    "dense_slots_bounded",
    "describe_call",
    "enable_autograd",
    "entry_table",
    "explain",
    "load_policy",
    "plain_dispatch",
    "record_receipts",
    "register_backend",
    "reload_settings",
    "report",
    "reset_report",
    "resolve",
    "slot_layout",
    "slot_rows",
    "token_bounds",
    "unregister_backend",
    "use_backend",
    "use_policy",
    "visible_entries",
]
