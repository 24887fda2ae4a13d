"""HOST's masters under ``torchrun --rdzv-backend dlrover``: a child of torchrun that keeps one leading and one in reserve.

``python -m dlrover_adapters.cli.torchrun_masters --config FILE --fd N --life M``: N is the listening socket, and M the end of a
pipe whose other end only torchrun holds: when that closes, for whatever reason, the masters go.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
from pathlib import Path

from dlrover_adapters.cli.settings import Settings
from dlrover_core.errors import CoreError, SpecError
from dlrover_core.spec import JobSpec

EX_OVER, EX_FAILED, EX_USAGE = 0, 70, 2


class Masters:
    """What torchrun holds of them. They end with this process, and by themselves with the job."""

    def __init__(
        self,
        spec: JobSpec,
        directory: Path,
        log: str,
        token: str,
        port: socket.socket,
        address: str,
        level: str,
        tls: tuple[str, str, str] = ("", "", ""),
    ) -> None:
        """``tls``: files of the certificate that masters show, of its key, and of the CA; empty: nothing is encrypted."""
        from dlrover_adapters.agent.spawn import module_command

        run = secrets.token_hex(6)
        settings = Settings(
            spec=spec.to_json(), run=run, mark=run, log=log, directory=str(directory), argv=(), nproc=1, mode="script",
            masters=(address,), joining=True, log_level=level, control_log=str(directory / "control.log"),
            tls_cert=tls[0], tls_key=tls[1], tls_ca=tls[2],
        )  # fmt: skip
        config = settings.write()
        life, self._life = os.pipe()
        try:
            self._process = subprocess.Popen(
                [
                    *module_command("dlrover_adapters.cli.torchrun_masters"),
                    "--config", str(config), "--fd", str(port.fileno()), "--life", str(life),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**os.environ, "DLROVER_TOKEN": token},
                pass_fds=(port.fileno(), life),
                start_new_session=True,
            )  # fmt: skip
        finally:
            os.close(life)

    @property
    def trouble(self) -> str:
        """Why there are no masters any more; empty while there are, or when the job is over."""
        code = self._process.poll()
        return f"its masters have ended with code {code}; their log says why" if code else ""

    @property
    def over(self) -> bool:
        """Have they ended because the job is over?"""
        return self._process.poll() == EX_OVER

    def close(self, seconds: float | None) -> None:
        """Wait so long for their own end (None: as long as it takes), then end them."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        if self._life >= 0:
            os.close(self._life)
            self._life = -1
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def main() -> int:
    """Keep masters until the job is over, or torchrun is."""
    parser = argparse.ArgumentParser(prog="dlrover-masters")
    parser.add_argument("--config", required=True)
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--life", type=int, required=True)
    options = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)  # torchrun decides what they mean, and its end is ours
    try:
        return asyncio.run(_keep(Settings.read(options.config), options.fd, options.life))
    except SpecError as error:
        print(f"torchrun: {error}", file=sys.stderr)
        return EX_USAGE
    except CoreError as error:
        print(f"torchrun: the job's masters cannot run: {error}", file=sys.stderr)
        return EX_FAILED


async def _keep(settings: Settings, fd: int, life: int) -> int:
    from dataclasses import replace

    from dlrover_adapters.agent.process import set_name
    from dlrover_adapters.cli import scratch
    from dlrover_adapters.cli.lead import probed
    from dlrover_adapters.cli.supervisor import MastersFailed, NoNodes, Supervisor
    from dlrover_adapters.cli.upkeep import kept as kept_on_disk
    from dlrover_adapters.http.token import kept
    from dlrover_adapters.telemetry.logs import set_up

    set_name("dlrover-masters")
    set_up(Path(settings.control_log), settings.log_level, role="masters")
    directory, token = Path(settings.directory), os.environ["DLROVER_TOKEN"]
    with (
        scratch.claim(directory, settings.job.job) as claim,
        scratch.folder(settings.mark, claim) as folder,
        kept(token, folder, directory / "token"),
        socket.socket(fileno=fd) as port,
    ):
        settings = await probed(replace(settings, run_dir=str(folder)))
        settings.write()
        port.set_inheritable(False)
        supervisor = Supervisor(settings, token, port, NoNodes(), "torchrun")
        running = asyncio.ensure_future(supervisor.run())
        gone = asyncio.ensure_future(_closed(life))
        try:
            async with kept_on_disk(settings, token, "torchrun"):
                await asyncio.wait({running, gone}, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                running.result()
        except MastersFailed as error:
            print(f"torchrun: {error}", file=sys.stderr)
            return EX_FAILED
        finally:
            for task in (running, gone):
                task.cancel()
            await asyncio.gather(running, gone, return_exceptions=True)
    return EX_OVER


async def _closed(life: int) -> None:
    """Until nobody holds the other end."""
    loop, end = asyncio.get_running_loop(), asyncio.Event()
    os.set_blocking(life, False)
    loop.add_reader(life, end.set)
    try:
        await end.wait()
    finally:
        loop.remove_reader(life)


if __name__ == "__main__":
    sys.exit(main())
