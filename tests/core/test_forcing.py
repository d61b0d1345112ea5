"""Forcing: argument over context over environment over policy, and never a quiet other one."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch

import csa_dispatch
from csa_dispatch import (
    BackendRefused,
    Between,
    Capabilities,
    OneOf,
    attention,
    explain,
    record_receipts,
    resolve,
    use_backend,
)
from tests.core.probes import WindowBackend, inputs


def window_call(**forced: Any) -> tuple[str, ...]:
    """Which backend ran each direction of a small window call."""
    made = inputs(grad=True)
    with record_receipts() as receipts:
        attention(made.query, made.local_kv, sliding_window_size=3, **forced).sum().backward()
    return tuple(receipt.backend for receipt in receipts)


@pytest.fixture
def three(registered: Any) -> None:
    for name in ("one", "two", "three"):
        registered(WindowBackend(name))


@pytest.mark.usefixtures("three")
def test_precedence_is_argument_context_environment_policy(environment: Any) -> None:
    assert window_call() == ("eager", "eager")
    environment("CSA_DISPATCH_BACKEND", "one")
    assert window_call() == ("one", "one")
    with use_backend("two"):
        assert window_call() == ("two", "two")
        assert window_call(backend="three") == ("three", "three")
        with use_backend("three"):
            assert window_call() == ("three", "three")
        assert window_call() == ("two", "two")
    assert window_call() == ("one", "one")


@pytest.mark.usefixtures("three")
def test_backward_is_forced_apart_from_forward(environment: Any) -> None:
    assert window_call(backend="one", backward_backend="two") == ("one", "two")
    assert window_call(backward_backend="two") == ("eager", "two")
    with use_backend("one", backward="three"):
        assert window_call() == ("one", "three")
        assert window_call(backward_backend="two") == ("one", "two")
        assert window_call(backend="two") == ("two", "two")
    environment("CSA_DISPATCH_BACKWARD_BACKEND", "three")
    assert window_call() == ("eager", "three")


@pytest.mark.usefixtures("three")
def test_backward_runs_where_it_was_decided_not_where_it_is_called() -> None:
    made = inputs(grad=True)
    with use_backend("one"):
        output = attention(made.query, made.local_kv, sliding_window_size=3)
    with record_receipts() as receipts, use_backend("two"):
        output.sum().backward()
    assert [receipt.backend for receipt in receipts] == ["one"]


@pytest.mark.usefixtures("three")
def test_context_is_per_thread_and_per_task() -> None:
    seen: dict[str, tuple[str, ...]] = {}
    barrier = threading.Barrier(2)

    def thread(name: str) -> None:
        with use_backend(name):
            barrier.wait(timeout=10)
            seen[name] = (explain(inputs().query, inputs().local_kv).forward or "",)
            barrier.wait(timeout=10)

    threads = [threading.Thread(target=thread, args=(name,)) for name in ("one", "two")]
    for item in threads:
        item.start()
    for item in threads:
        item.join()
    assert seen == {"one": ("one",), "two": ("two",)}

    shared = use_backend("three")

    async def task(name: str | None) -> str | None:
        block = shared if name is None else use_backend(name)
        with block:
            await asyncio.sleep(0.01)
            return explain(inputs().query, inputs().local_kv).forward

    async def both() -> list[str | None]:
        return await asyncio.gather(task("one"), task(None), task("two"), task(None))

    assert asyncio.run(both()) == ["one", "three", "two", "three"]
    assert explain(inputs().query, inputs().local_kv).forward == "eager"


def test_block_is_left_when_it_raises() -> None:
    with pytest.raises(KeyError), use_backend("attention_gym"):
        raise KeyError
    assert explain(inputs().query, inputs().local_kv).forward == "eager"


@pytest.mark.parametrize(
    ("forced", "sentence"),
    [
        ({"backend": "narrow"}, "backend narrow was forced by argument but cannot run this call."),
        (
            {"backward_backend": "narrow"},
            "backward_backend narrow was forced by argument; no forward of the policy can run "
            "this call with it.",
        ),
        (
            {"backend": "eager", "backward_backend": "narrow"},
            "backend eager and backward_backend narrow were forced by argument but cannot run "
            "this call together.",
        ),
    ],
    ids=str,
)
def test_a_refusal_says_what_was_forced(registered: Any, forced: Any, sentence: str) -> None:
    registered(WindowBackend("narrow", Capabilities(head_dim=OneOf((512,)))))
    made = inputs(grad=True)
    with pytest.raises(BackendRefused) as caught:
        attention(made.query, made.local_kv, sliding_window_size=3, **forced)
    first, *reasons = str(caught.value).splitlines()
    assert first == sentence
    assert all("narrow" in line for line in reasons)
    assert any("head_dim is 16; needs 512" in line for line in reasons)
    call = {"query": made.query, "local_kv": made.local_kv, "sliding_window_size": 3}
    assert explain(**call, **forced).why == sentence.rstrip(".")
    with pytest.raises(BackendRefused) as caught:
        resolve(**call, **forced)
    assert str(caught.value).splitlines() == [f"no plan: {sentence}", *reasons]


def test_forced_backend_raises_with_every_reason(registered: Any) -> None:
    limits = Capabilities(head_dim=OneOf((512,)), heads=Between(64, 128))
    registered(WindowBackend("narrow", limits))
    made = inputs()
    with pytest.raises(BackendRefused) as caught, record_receipts() as receipts:
        attention(made.query, made.local_kv, backend="narrow")
    assert {reason.field for reason in caught.value.reasons["narrow"]} == {"head_dim", "heads"}
    assert "head_dim is 16; needs 512" in str(caught.value)
    assert receipts == []


def test_forward_without_backward_is_out_when_gradients_are_needed(registered: Any) -> None:
    registered(WindowBackend("forward_only", backward=False))
    made = inputs(grad=True)
    with pytest.raises(BackendRefused, match="no backward"):
        attention(made.query, made.local_kv, backend="forward_only")
    with torch.no_grad():
        attention(made.query, made.local_kv, backend="forward_only")
    assert window_call(backend="forward_only", backward_backend="eager") == (
        "forward_only",
        "eager",
    )


def test_kernel_error_is_never_retried_elsewhere(registered: Any) -> None:
    class Failing(WindowBackend):
        def forward(self, call: Any) -> Any:
            raise RuntimeError("kernel fault")

    registered(Failing("failing"))
    made = inputs()
    with record_receipts() as receipts, pytest.raises(RuntimeError, match="kernel fault"):
        attention(made.query, made.local_kv, backend="failing")
    assert receipts == []


def test_unknown_names_are_errors_wherever_they_come_from(environment: Any) -> None:
    with pytest.raises(ValueError, match="use_backend is 'tritn'"):
        use_backend("tritn")
    environment("CSA_DISPATCH_BACKEND", "nope")
    with pytest.raises(ValueError, match="CSA_DISPATCH_BACKEND is 'nope'"):
        window_call()


def test_unknown_variables_warn_and_bad_values_fail(
    monkeypatch: pytest.MonkeyPatch, environment: Any
) -> None:
    monkeypatch.setenv("CSA_DISPATCH_BAKEND", "eager")
    with pytest.warns(UserWarning, match=r"CSA_DISPATCH_BAKEND.*CSA_DISPATCH_BACKEND"):
        csa_dispatch.reload_settings()
    monkeypatch.delenv("CSA_DISPATCH_BAKEND")
    for name, value in (("CSA_DISPATCH_FALLBACK", "maybe"), ("CSA_DISPATCH_CHECK_VALUES", "yes")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            with pytest.raises(ValueError, match=name):
                csa_dispatch.reload_settings()
