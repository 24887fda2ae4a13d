"""The checker of the matrix finds each kind of difference that a restore can make, planted in notes that were right."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

MATRIX = str(Path(__file__).parents[1] / "matrix")
if MATRIX not in sys.path:
    sys.path.insert(0, MATRIX)

from check import Wrong, check  # noqa: E402  # the script's neighbours find it so too

STEPS, KILL, RESTORED = 6, 4, 3
Lines = dict[int, list[dict[str, Any]]]


def step(rank: int, number: int, life: int) -> dict[str, Any]:
    """What a rank notes of a step."""
    whole = {"w": f"w{number}", f"of-{rank}": f"{rank}.{number}"}
    return {
        "life": life, "step": number, "loss": float(number).hex(), "extra": [rank, number], "drawn": [number], "whole": whole,
    }  # fmt: skip


def life(number: int, first: int, last: int, tier: str) -> Lines:
    """Two ranks that make steps ``first`` + 1 to ``last``; at `STEPS` they end."""
    return {
        rank: [
            {"life": number, "restored": first, "tier": tier, "world": 2, "whole": step(rank, first, 0)["whole"]},
            *(step(rank, one, number) for one in range(first + 1, last + 1)),
            *([{"life": number, "ended": last}] if last == STEPS else []),
        ]
        for rank in (0, 1)
    }


def written(folder: Path, *of: Lines) -> Path:
    """Those lives, as ranks leave them."""
    folder.mkdir()
    for rank in (0, 1):
        lines = [line for one in of for line in one.get(rank, ())]
        (folder / f"rank-{rank}").write_text("".join(f"{json.dumps(one)}\n" for one in lines))
    return folder


def checked(tmp_path: Path, first: Lines, second: Lines, *, reshaped: bool = False) -> Any:
    """The verdict over two lives."""
    control = written(tmp_path / "control", life(0, 0, STEPS, "nothing"))
    found = written(tmp_path / "found", first, second)
    return check(found, control, steps=STEPS, least=2, tiers={"memory"}, reshaped=reshaped)


def test_what_is_right_is_found_right(tmp_path: Path) -> None:
    """Both lives count, those of a world of another size only up to the blow."""
    before, after = life(0, 0, KILL, "nothing"), life(1, RESTORED, STEPS, "memory")
    assert checked(tmp_path, before, after) == (RESTORED, "memory", 2 * (KILL + STEPS - RESTORED))


def test_another_world_is_judged_by_its_state(tmp_path: Path) -> None:
    """Its losses and what each rank has may differ; full tensors after the restore may not."""
    after = life(1, RESTORED, STEPS, "memory")
    for lines in after.values():
        for one in lines[1:-1]:
            one.update(loss=(99.0).hex(), extra=None)
    assert checked(tmp_path, life(0, 0, KILL, "nothing"), after, reshaped=True).compared == 2 * KILL
    after[1][0]["whole"]["of-1"] = "another"
    with pytest.raises(Wrong, match="1 of 3 tensors differ: of-1"):
        check(
            written(tmp_path / "again", life(0, 0, KILL, "nothing"), after),
            tmp_path / "control",
            steps=STEPS,
            least=2,
            tiers={"memory"},
            reshaped=True,
        )


PLANTED: dict[str, tuple[Callable[[Lines, Lines], Any], str]] = {
    "another rank's extra": (
        lambda _, after: after[1][1].update(extra=[0, 4]),
        "rank 1, restored 3 from memory: extra of step 4",
    ),
    "other random numbers": (lambda _, after: after[0][2].update(drawn=[0]), "drawn of step 5"),
    "the last bit of a loss": (
        lambda _, after: after[0][1].update(loss=(4.000000000000001).hex()),
        "loss of step 4: 0x1.0000000000001p",
    ),
    "a tensor": (lambda _, after: after[1][3]["whole"].update(w="other"), "whole of step 6: 1 of 2 tensors differ: w"),
    "a tensor before the blow": (lambda before, _: before[0][2]["whole"].update(w="other"), "life 0, rank 0"),
    "a tensor just after the restore": (
        lambda _, after: after[1][0]["whole"].update({"of-1": ""}),
        "tensors differ: of-1",
    ),
    "replicas that differ": (
        lambda _, after: after[1][0]["whole"].update(w="other"),
        "w after step 3 differs between ranks",
    ),
    "a tensor that is gone": (lambda _, after: after[1][0]["whole"].pop("of-1"), "tensors differ: of-1"),
    "a step left out": (lambda _, after: after[0].pop(2), "step 6 came where 5 was due"),
    "ranks at different steps": (
        lambda _, after: after[1][0].update(restored=2),
        "ranks restored different steps",
    ),
    "an old step": (
        lambda _, after: [lines[0].update(restored=1) for lines in after.values()],
        "life 1 restored step 1, though step 2 was safe",
    ),
    "another tier": (lambda _, after: after[0][0].update(tier="storage"), r"was restored from \['memory', 'storage'\]"),
    "a rank without an end": (lambda _, after: after[1].pop(), "rank 1 did not end after step 6"),
    "a rank that is missing": (lambda _, after: after.pop(1), r"life 1 has ranks \[0\]"),
    "no second life": (lambda _, after: after.clear(), "1 lives"),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_what_is_wrong_is_found_wrong(tmp_path: Path, planted: str) -> None:
    """Every difference is an error that names where it is."""
    before, after = life(0, 0, KILL, "nothing"), life(1, RESTORED, STEPS, "memory")
    plant, words = PLANTED[planted]
    plant(before, after)
    with pytest.raises(Wrong, match=words):
        checked(tmp_path, before, after)


def test_a_step_older_than_it_had_to_be_is_wrong(tmp_path: Path) -> None:
    """Training that begins anew has the right curve too."""
    with pytest.raises(Wrong, match="restored step 1, though step 2 was safe"):
        checked(tmp_path, life(0, 0, KILL, "nothing"), life(1, 1, STEPS, "memory"))


def test_rows_have_the_world_sizes_of_their_kinds() -> None:
    """Every kind has one row, with the world sizes of its class."""
    from kinds import KINDS
    from tests.matrix.cells import ROWS

    assert {one.kind: (one.world, one.other) for one in ROWS} == {
        name: (kind.world, kind.other) for name, kind in KINDS.items()
    }
