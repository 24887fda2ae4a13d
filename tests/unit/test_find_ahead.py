"""What torch's compiler finds out about a host is found out once, in the zygote, for all workers of a script that needs it."""

from __future__ import annotations

import functools
import os
import sys
import types
from typing import Any

import pytest

from dlrover_adapters.torch.worker import VECTORS, find, found


class Inductor(types.ModuleType):
    """Its module for vector instructions, as far as it is used here. ``here``: what this host has."""

    def __init__(self, here: str) -> None:
        super().__init__(VECTORS)
        self.here, self.looks = here, 0

        class VecISA:
            @functools.cache  # noqa: B019  # as inductor's
            def usable(self, name: str) -> bool:
                return bool(name)

        self.VecISA = VecISA
        self.one = VecISA()

        @functools.cache
        def valid_vec_isa_list() -> list[str]:
            self.looks += 1
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = "/default"
            return [one for one in self.here.split() if self.one.usable(one)]

        self.valid_vec_isa_list = valid_vec_isa_list


@pytest.fixture
def inductor(monkeypatch: pytest.MonkeyPatch) -> Inductor:
    """One that is imported."""
    made = Inductor("avx2")
    monkeypatch.setitem(sys.modules, VECTORS, made)
    return made


def test_nothing_is_found_where_nobody_looked(inductor: Inductor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither before inductor is imported, nor before it compiles, nor where it keeps it in another way."""
    assert found() == ()
    inductor.valid_vec_isa_list = list
    assert found() == ()
    find([f"{VECTORS}: avx2"])
    monkeypatch.delitem(sys.modules, VECTORS)
    assert found() == ()
    find([f"{VECTORS}: avx2"])


def test_a_worker_says_what_was_found_and_the_zygote_finds_it(
    inductor: Inductor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variables are as before: a script may give inductor another folder."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    inductor.valid_vec_isa_list()
    (told,) = found()
    assert told == f"{VECTORS}: avx2"
    inductor.valid_vec_isa_list.cache_clear()
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    before = dict(os.environ)
    find(["of a later version: x", told])
    assert inductor.looks == 2
    assert found() == (told,)
    assert dict(os.environ) == before


def test_torch_s_sources_are_hashed_where_the_compiler_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every process that compiles needs that, on whatever device."""
    hashed: list[str] = []
    module = types.SimpleNamespace(torch_key=lambda: hashed.append("yes"))
    monkeypatch.setitem(sys.modules, "torch._inductor.codecache", module)  # type: ignore[arg-type]
    find(())
    assert hashed


def test_nobody_looks_for_what_no_worker_needed(inductor: Inductor) -> None:
    """A job on GPUs compiles nothing for the CPU."""
    find(["of a later version: x"])
    assert not inductor.looks


def test_another_answer_than_workers_had_is_not_kept(inductor: Inductor) -> None:
    """The compiler could not be started, or the list is another host's: workers find it out themselves."""
    inductor.here = ""
    find([f"{VECTORS}: avx2"])
    assert found() == ()
    inductor.here = "avx512 avx2"
    find([f"{VECTORS}: avx2"])
    assert found() == ()
    assert not inductor.VecISA.__dict__["usable"].cache_info().currsize


def test_what_fails_is_no_reason_to_end(inductor: Inductor) -> None:
    """Whoever needs it meets the same error."""

    def fails() -> Any:
        raise OSError("no compiler")

    inductor.valid_vec_isa_list = functools.cache(fails)
    find([f"{VECTORS}: avx2"])
    assert found() == ()
