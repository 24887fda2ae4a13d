"""ElasticJobs' command lines, read by the commands' own parsers before anything is made: what is wrong is told at once.

A node's agent reads its line in a pod, and masters theirs in another. Both would fail there, in words that only their logs have.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from dlrover_adapters.cli import groups, node, ray_flags, usage
from dlrover_adapters.cli import options as cli_options
from dlrover_adapters.cli.torchrun_flags import Options
from dlrover_core.errors import SpecError

if TYPE_CHECKING:
    from dlrover_backends.k8s.elasticjob.shell import Word
    from dlrover_core.spec import JobSpec

KNOWN_MAX = 4096
PLACES = {
    **dict.fromkeys(("backend", "image", "gang", "queue"), "the operator makes this job's pods, as its object says"),
    **dict.fromkeys(ray_flags.FLAGS, "the operator makes this job's pods, as its object says"),
    **dict.fromkeys(
        ("masters", "bind", "master"), "the job's masters are pods, which the operator makes and nodes know"
    ),
    **dict.fromkeys(("role_groups", "job_file"), "the groups of this job are those of spec.replicaSpecs"),
    **dict.fromkeys(("local_nodes",), "a pod is one node: write replicas"),
    **dict.fromkeys(("resume", "owner"), "the run is this object's"),
    **dict.fromkeys(("tls_cert", "tls_key", "tls_ca"), "masters that are pods do not encrypt yet"),
}
"""Options that say where a job is, and what says that here."""
PRINTS = {"-h": "help", "--help": "help"}
_ELSEWHERE = {"log_dir": None, "signatures": None, "tls_cert": None, "tls_key": None, "tls_ca": None, "detach": False}
"""Files that only the node's image has, and what does nothing there."""


class Lines:
    """Reads lines as `dlrover-run` does (`dlrover_backends.k8s.elasticjob.launchers.Lines`)."""

    def line(self, words: Sequence[Word]) -> None:
        """A launcher's line in a pod, from after its name. Raises `SpecError`."""
        _raised(_line(tuple(_closed(words))))

    def job(self, words: Sequence[str], path: str, job_file: str) -> None:
        """What masters are told: their words, which name a job file at a path. Raises `SpecError`."""
        _raised(_job(tuple(words), path, job_file))


class Fault(NamedTuple):
    """What is wrong with a line. No error is kept: each time that it is raised it takes hold of its callers' frames."""

    field: str
    message: str


def _fault(error: SpecError) -> Fault:
    return Fault(error.field, str(error).removeprefix(f"{error.field}: "))


def _raised(fault: Fault | None) -> None:
    if fault is not None:
        raise SpecError(*fault)


def _closed(words: Sequence[Word]) -> Iterator[str]:
    """Those words whose values are known; a flag without its value is none."""
    from dlrover_backends.k8s.elasticjob.launchers import SWITCHES

    at = 0
    while at < len(words):
        one = words[at]
        if not one.text.startswith("-") or one.text == "--":
            yield from (each.text for each in words[at:])
            return
        takes = "=" not in one.text and one.text.lstrip("-").replace("_", "-") not in SWITCHES
        found = words[at : at + 2] if takes and at + 1 < len(words) and words[at + 1].open else [one]
        if not any(each.open for each in found):
            yield from (each.text for each in found)
        elif one.text.partition("=")[0] not in _known():
            yield one.text.partition("=")[0]  # whatever its value is
        at += len(found)
        # A flag that is not known may take a value or not: the parser refuses it either way.
        if takes and len(found) == 1 and at < len(words) and not words[at].text.startswith("-"):
            yield words[at].text
            at += 1


@functools.lru_cache(maxsize=1)
def _known() -> frozenset[str]:
    return frozenset(_parser()._option_string_actions)


@functools.lru_cache(maxsize=KNOWN_MAX)
def _line(words: tuple[str, ...]) -> Fault | None:
    """What is wrong with it; None: nothing."""
    try:
        _check(words)
    except SpecError as error:
        return _fault(error)
    return None


def _check(words: tuple[str, ...]) -> None:
    if words and words[0] in PRINTS:
        raise SpecError("dlrover-run", f"{words[0]} prints its help, and runs nothing")
    made = _parser()
    options = made.parse_args(list(words), namespace=Options())
    for name in ("version", "show_config", "job_schema"):
        if getattr(options, name):
            raise SpecError(
                "dlrover-run", f"--{name.replace('_', '-')} prints something, and runs nothing: leave it out"
            )
    for name, why in PLACES.items():
        if options.origin(name).startswith("-"):
            spelled = {"job_file": "job", "owner": "run"}.get(name, name.replace("_", "-"))
            raise SpecError("dlrover-run", f"--{spelled} has no place in an ElasticJob: {why}; leave it out")
    cli_options.noted(made, options)
    vars(options).update(node.DROPPED, **_ELSEWHERE)
    cli_options.check(options)


def _parser() -> usage.Parser:
    made = cli_options.parser()
    assert isinstance(made, usage.Parser)
    made.raises = True
    return made


@functools.lru_cache(maxsize=KNOWN_MAX)
def _job(words: tuple[str, ...], path: str, job_file: str) -> Fault | None:
    try:
        spec_of(words, path, job_file)
    except SpecError as error:
        return _fault(error)
    return None


def spec_of(words: Sequence[str], path: str, job_file: str) -> JobSpec:
    """The job that masters make of their words, which name a job file at a path. Raises `SpecError`."""
    with tempfile.NamedTemporaryFile("w", suffix=".toml", encoding="utf-8") as file:
        file.write(job_file)
        file.flush()
        told = [one.replace(path, file.name) for one in words]
        made = _parser()
        options = cli_options.noted(made, made.parse_args(["--backend", "k8s:command=template", *told], Options()))
        options.argv = tuple(told)
        groups.taken_in(options)
        cli_options.check(options)
        return groups.spec(options, cli_options.job_name(options), groups.plans(options))
