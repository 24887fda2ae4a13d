"""An order's work and parts side by side, as tests ask for them and make them."""

from __future__ import annotations

from typing import Any

from dlrover_core.job.checkpoints import Keep, Persist
from dlrover_core.job.checks import CheckWork
from dlrover_core.job.hangs import Probe
from dlrover_core.job.orders import Order, Work
from dlrover_core.job.plans import Boundary

_PARTS: dict[str, tuple[type, str]] = {
    "probe": (Probe, "hang"),
    "check": (CheckWork, "number"),
    "check_with": (CheckWork, "others"),
    "check_us": (CheckWork, "within_us"),
    "persist": (Persist, "step"),
    "persist_of": (Persist, "of"),
    "persist_places": (Persist, "places"),
    "plan": (Boundary, "plan"),
    "plan_go": (Boundary, "go"),
    **{name: (Keep, name) for name in Keep._fields},
    **{f"check_{name}": (CheckWork, name) for name in ("round", "kind", "rank", "size", "store", "at")},
    **{name: (Work, name) for name in Work._fields},
}


class Told:
    """An order whose work and parts are attributes, by the names above."""

    def __init__(self, order: Order) -> None:
        self.order = order

    def __getattr__(self, name: str) -> Any:
        cls, field = _PARTS.get(name, (Order, name))
        whole: Any = self.order if cls is Order else self.order.work if cls is Work else self.order.part(cls)
        return getattr(whole, field)


def ordering(base: Order, **fields: Any) -> Order:
    """The order with other fields, whosesoever they are."""
    order, work, parts = base, base.work, dict[Any, Any]()
    for name, value in fields.items():
        cls, field = _PARTS.get(name, (Order, name))
        if cls is Order:
            order = order._replace(**{field: value})
        elif cls is Work:
            work = work._replace(**{field: value})
        else:
            parts[cls] = (parts.get(cls) or base.part(cls))._replace(**{field: value})
    return order._replace(work=work).telling(*parts.values())
