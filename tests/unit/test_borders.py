"""Foreign words do not harm anybody: a smoke of the campaign `borders`, and what it found, one by one."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import urlsplit

import pytest
from tests.unit.borders import trial

from dlrover_adapters.agent import cgroup, hang_duty, last_words, wire
from dlrover_adapters.agent.checkpoints import vault
from dlrover_adapters.agent.checks import workload
from dlrover_adapters.agent.doorbell import STEP_MAX, Doorbell
from dlrover_adapters.cli import diagnose, main, read
from dlrover_adapters.cli.places import log_url
from dlrover_adapters.cli.settings import Settings
from dlrover_adapters.cli.told import Teller
from dlrover_adapters.torch import steps, worker
from dlrover_adapters.torch.checkpoint import vault as client
from dlrover_backends.shared import wire as node_wire
from dlrover_core.diagnosis import flight
from dlrover_core.job import evidence, incidents
from dlrover_core.logs import open_log
from dlrover_core.logs.place import file_system
from dlrover_core.runtime import messages
from dlrover_core.runtime.outbox import Outbox
from dlrover_core.runtime.transport import FRAME_BYTES_MAX
from dlrover_core.words import INTEGER_MAX, TEXT_CHARS_MAX, plain, plain_fields, quiet_json

NAME = "/data/caf\udce9.jpg"


@pytest.mark.parametrize("seed", range(40))
def test_no_word_harms_anybody(seed: int) -> None:
    """A few of the campaign's trials: every border keeps its promise, whatever the words are."""
    assert trial(seed)["words"] > 100


def test_plain_text() -> None:
    """File names stay readable, sequences go, control characters are shown, line breaks stay, the cut is marked."""
    assert plain(f"no label for {NAME}") == r"no label for /data/caf\xe9.jpg"
    assert plain("\x1b[31mred\x1b[0m \x1b]0;title\x07x\x00\ud800") == r"red x\x00\ud800"
    assert plain("one\r\ntwo\rthree\tfour\n") == "one\ntwo\nthree\tfour\n"
    assert plain("\x1b]0;no end\nValueError: here") == "\\x1b]0;no end\nValueError: here"
    assert plain("x" * 100_000) == "x" * (TEXT_CHARS_MAX - 3) + "..."
    assert plain("é漢\u202e") == "é漢\u202e"


def test_plain_fields() -> None:
    """A message keeps its type; its texts are plain, all together bounded, its numbers within what messages hold."""
    told = evidence.ReportEvidence("n", "log", "s", "\x00" * 9, 2**63, 0, -(2**70))
    assert plain_fields(told) == told._replace(rank=INTEGER_MAX, text="\\x00" * 9, age_us=-INTEGER_MAX)
    assert sum(map(len, plain_fields(("x" * 16_000,) * 64))) <= 131_072
    same = ("a", 1, ("b", True, None, b"\xff"))
    assert plain_fields(same) is same


def test_a_mistake_in_the_data_is_reported_as_one() -> None:
    """The words of a dead worker reach the master, though they cannot be encoded as they are."""

    async def test() -> messages.Message:
        outbox = Outbox()
        outbox.add(
            incidents.ReportExit(
                "n", 1, 0, 1, False, 3, 2**62, "\x1b[31m" + NAME, f"ValueError: {NAME}" + "\ud800" * 200_000
            )
        )
        item = outbox.next()
        assert item is not None
        frame = messages.encode(messages.numbered(*item))
        assert len(frame) < FRAME_BYTES_MAX
        return messages.command_of(cast(messages.Numbered, messages.decode(frame)))

    told = cast(incidents.ReportExit, asyncio.run(test()))
    assert (told.exit_code, told.tail, told.age_us) == (1, r"/data/caf\xe9.jpg", INTEGER_MAX)
    assert told.error.startswith(r"ValueError: /data/caf\xe9.jpg\ud800")


def test_an_older_agents_words_are_plain_at_the_master() -> None:
    """A master cleans what an agent of another version sends, and the name under which a host greets."""
    command = incidents.ReportExit("n", 1, 0, 1, False, 3, 0, "\x1b[2J\x00", "", "", "")
    sent = messages.decode(messages.encode(messages.Numbered(1, 9, tuple(command))))
    assert messages.command_of(cast(messages.Numbered, sent))[7] == r"\x00"
    hello = messages.Hello(5, "", "", 1, 0, 0, "h\x1b[2J\udce9", 1)
    assert cast(messages.Hello, messages.decode(messages.encode(hello))).host == r"h\xe9"


TIMED = b'{"message": {"message": "x", "extraInfo": {"timestamp": "%s"}}}'


@pytest.mark.parametrize("body", [b"[" * 100_000, TIMED % (b"9" * 400)], ids=["deep", "late"])
def test_error_files_that_make_no_sense(tmp_path: Path, body: bytes) -> None:
    """An error file nested too deep, or with a time beyond all times, is no reason for the agent to end."""
    (tmp_path / "error.json").write_bytes(body)
    last_words.read_error(str(tmp_path / "error.json"))
    assert last_words.read_trace(str(tmp_path / "error.json")) == ""


def test_an_error_file_with_half_characters(tmp_path: Path) -> None:
    """The error's text is plain."""
    (tmp_path / "error.json").write_text(json.dumps({"message": f"no label for {NAME}\x00"}))
    assert last_words.read_error(str(tmp_path / "error.json"))[0] == r"no label for /data/caf\xe9.jpg\x00"


def test_recorders_that_make_no_sense() -> None:
    """A dump nested too deep, or with a number beyond all numbers, is no dump."""
    assert flight.newest(b"[" * 100_000) == ()
    entry = {"process_group": ["g"], "collective_seq_id": 1e999}
    assert flight.newest(json.dumps({"entries": [entry]})) == ()


def test_stacks_with_half_characters_are_kept(tmp_path: Path) -> None:
    """What a rank was at is written down, whatever its files are called."""
    duty = hang_duty.HangDuty(cast(Any, None), str(tmp_path))
    path = duty._keep("n", 1, [f"File {NAME}"])
    assert "caf" in Path(path).read_text()


def test_steps_beyond_all_numbers() -> None:
    """A script may count as it likes: what the agent hears of it fits into a message."""
    rung: list[int] = []
    bell = Doorbell("/nonexistent", lambda _generation, _rank, step, _told, _imports: rung.append(step))
    packet = wire.pack({"generation": 1, "rank": 0, "step": 2**64 - 1, "told": True})
    assert bell._understood(cast(Any, None), packet)
    assert rung == [STEP_MAX]


def test_a_script_may_tell_any_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number that no packet holds does not raise in the script."""
    told: list[int] = []
    monkeypatch.setattr(steps, "_signal", SimpleNamespace(told=told.append))
    for step in (7, 10**30, -(10**30)):
        steps.tell(step)
    assert told == [7, STEP_MAX, -STEP_MAX]


def test_errors_that_cannot_be_written_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error whose text raises, or is a megabyte long, is recorded, with the frames it came from."""

    class Mute(RuntimeError):
        def __str__(self) -> str:
            raise ValueError("no text")

    for number, error in enumerate((Mute(), ValueError("\ud800" * 1_000_000))):
        path = str(tmp_path / str(number))
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", path)
        try:
            raise error
        except RuntimeError as caught:
            worker.record_error(caught)
        except ValueError as caught:
            worker.record_error(caught)
        assert last_words.read_error(path)[0].startswith(("Mute: <its text cannot be had>", "ValueError: \\ud800"))
        assert "test_borders.py" in last_words.read_trace(path)


def test_results_of_checks_that_make_no_sense() -> None:
    """A check that took forever, or says so deep within lists, is one that failed."""
    for line in ('{"ok": true, "fit": true, "took_s": 1e999, "alone_s": 0, "what": ""}', "[" * 100_000):
        assert not workload._result(0, cast(Any, SimpleNamespace(last_line=line, exit_code=1)), 5.0).ok


def test_packets_of_workers() -> None:
    """An alarm is heard, with any words; a packet without a verb ends its connection, and nothing else."""
    heard: list[dict[str, Any]] = []

    async def test() -> None:
        box = vault.Vault("/nonexistent")
        box.launch = cast(Any, SimpleNamespace(generation=1))
        box.listener = cast(Any, SimpleNamespace(told=lambda _caller, body: heard.append(body)))
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        box._open[ours] = vault.Caller(1, 0, 0, 1)
        worker = object.__new__(client.Vault)
        worker._gone, worker._pid, worker._quick = "", os.getpid(), theirs
        worker.alarm("step 3: no label for " + NAME + "\x00" * 100_000)
        box._hear(ours)
        assert worker.gone == ""
        assert ours in box._open
        theirs.send(wire.pack({"op": ["hello"]}))
        box._hear(ours)
        assert ours not in box._open
        theirs.close()

    asyncio.run(test())
    assert heard[0]["op"] == "alarm"
    assert heard[0]["words"].startswith(r"step 3: no label for /data/caf\xe9.jpg\x00")
    assert len(heard[0]["words"]) == client.ALARM_CHARS_MAX


def test_arguments_that_are_no_text() -> None:
    """Arguments and environments reach workers byte by byte."""
    ours, theirs = wire.pair()
    with ours, theirs:
        wire.send(ours, {"argv": [NAME], "env": {"A": "\udcff"}})
        frame = wire.receive(theirs)
    assert frame is not None
    assert frame.body == {"argv": [NAME], "env": {"A": "\udcff"}}


def test_hosts_whose_name_is_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leader's name and what a node host says of its host can be written, wherever the host's name comes from."""
    monkeypatch.setattr(socket, "gethostname", lambda: "h\udce9")
    holder = Settings.holder(cast(Any, SimpleNamespace(mark="m")), 7, 1)
    assert holder == r"h\xe9/7/m-1"

    async def test() -> tuple[Any, ...]:
        reader, sent = asyncio.StreamReader(), []
        writer: Any = SimpleNamespace(write=sent.append, drain=lambda: asyncio.sleep(0))
        await node_wire.write(writer, "observe", "h\ud800")
        reader.feed_data(b"".join(sent))
        return await node_wire.read(reader)

    assert asyncio.run(test()) == ("observe", r"h\ud800")


def test_a_state_directory_that_is_no_text(tmp_path: Path) -> None:
    """The log lies where the user said, byte by byte."""
    folder = tmp_path / "caf\udce9"
    folder.mkdir()
    url = log_url(None, folder)
    assert urlsplit(url).path.endswith("caf%E9/log.db")

    async def test() -> None:
        async with open_log(url) as log:
            assert await log.jobs() == []
            await (await log.lead("j", "me")).resign()

    asyncio.run(test())
    assert [os.fsencode(one.name) for one in tmp_path.iterdir()] == [b"caf\xe9"]
    assert (folder / "log.db").exists()
    mounts = "1 0 0:1 / / rw - ext4 a rw\n2 1 0:2 / /mnt/caf\udce9 rw - nfs4 b rw\n"
    assert file_system(Path("/mnt/caf\udce9/x"), mounts) == "nfs4"


def test_a_control_group_whose_name_is_no_text(tmp_path: Path) -> None:
    """Our memory group is found where its name is not UTF-8."""
    group = tmp_path / "sys/fs/cgroup/p\udce9"
    group.mkdir(parents=True)
    (group / "memory.events").write_text("oom_kill 3\n")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_bytes(b"0::/p\xe9\n")
    found = cgroup.found(tmp_path)
    assert found is not None
    assert found.look().kills == 3


def test_json_for_programs_is_safe_on_a_terminal() -> None:
    """What steers a terminal is escaped, and a reader gets it back."""
    value = {"a": "\x9b2J\x7f\u202e\ud800é"}
    text = read.as_line(value)
    assert text == '{"a":"\\u009b2J\\u007f\\u202e\\ud800é"}'
    assert json.loads(text) == value
    assert quiet_json('"plain é"') == '"plain é"'


def test_what_the_launcher_says_is_one_plain_line(tmp_path: Path) -> None:
    """A line break or a sequence in a fact does not become one on the terminal."""
    with (tmp_path / "said").open("wb", buffering=0) as said:
        Teller("j", said.fileno())._say("rank 0 hangs in \x1b[2Jf\nline two\ud800")
    assert (tmp_path / "said").read_bytes() == b"rank 0 hangs in f line two\\ud800\n"


def test_diagnose_shows_plain_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A line of somebody's log cannot steer the terminal of the person who reads the verdict."""
    (tmp_path / "log").write_bytes(b"RuntimeError: CUDA error: uncorrectable ECC error encountered \x1b]0;x\x07 \x9b\n")
    main.main(["diagnose", str(tmp_path / "log")])
    said = capsys.readouterr().out
    assert "ECC" in said
    assert "\x1b" not in said
    assert diagnose.EXAMPLES
