"""docs/checkpoint.md and the README tell the truth of a script: their Python is run as it stands, in their order, and again.

Without a launcher, each script in a process of its own, with small real models where the page says ``model``.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [str(ROOT / one) for one in ("src", "src/adapters", "src/backends")]
BOUND_S = 220.0  # for all scripts of a test together, whose processes import torch, Lightning, transformers
pytestmark = pytest.mark.timeout(260)
MODEL = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)

def loss_of(model, batch):
    return model(batch).square().mean()
"""
LOADER = """
class Loader:
    position = 0
    def state_dict(self):
        return {"position": self.position}
    def load_state_dict(self, state):
        self.position = state["position"]

loader = Loader()

def data_after(step):
    assert loader.position == step
    for number in range(step, 40):
        loader.position = number + 1
        yield torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
"""
FILES = """
from pathlib import Path
def whole(folder):
    return sorted(one.parent.name for one in Path(folder).glob("*/manifest.json"))
"""
LIGHTNING = """
import warnings
warnings.simplefilter("ignore")
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

class Small(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 1))
        self.steps = []
    def training_step(self, batch, _index):
        self.steps.append(self.trainer.global_step)
        return self.net(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)

model = Small()
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(80, 8)), batch_size=4)
"""
HUGGINGFACE = """
import warnings
warnings.simplefilter("ignore")
import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=8, n_embd=16, n_layer=1, n_head=2))
dataset = [{"input_ids": torch.arange(one, one + 8) % 16, "labels": torch.arange(one, one + 8) % 16} for one in range(40)]
args = TrainingArguments(output_dir="out", max_steps=12, per_device_train_batch_size=4, report_to=[], use_cpu=True,
                         save_strategy="no", disable_tqdm=True)
"""

IMPORT = "from dlrover_adapters.torch import FlashCheckpoint"
IN_TURN = """
import os, runpy, sys
import torch, torch._dynamo
for script in sys.argv[1:]:
    print(end="\\f", flush=True)
    child = os.fork()
    if child == 0:
        runpy.run_path(script, run_name="__main__")
        sys.exit()
    if os.waitpid(child, 0)[1]:
        sys.exit(script)
"""


def block(page: str, words: str) -> str:
    """The one example of a page that has these words."""
    found = [one for one in _blocks(page) if words in one]
    assert len(found) == 1, f"{len(found)} examples of {page} have {words!r}"
    return found[0]


def _blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def run(
    folder: Path, stories: Mapping[str, Sequence[Sequence[str]]], *, imported: str = "torch"
) -> dict[str, list[str]]:
    """What the scripts of each story print, in turn; its ``/ckpts`` is its own. ``imported``: once for all of them."""
    names = []
    for story, scripts in stories.items():
        for number, parts in enumerate(scripts):
            names.append(f"{story}_{number}.py")
            code = "\n".join(map(textwrap.dedent, parts)).replace("/ckpts", str(folder / story))
            (folder / names[-1]).write_text(code)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("DLROVER", "RANK", "WORLD"))}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", IN_TURN.replace("import torch,", f"import {imported},"), *names],
        cwd=folder,
        env={**clean, "PYTHONPATH": os.pathsep.join(SOURCES), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    told = iter(done.stdout.split("\f")[1:])
    return {story: [next(told) for _ in scripts] for story, scripts in stories.items()}


def test_every_example_is_run() -> None:
    """Whoever adds an example adds its test."""
    words = (
        "scheduler=scheduler, extra=loader",
        "FlashStager()",
        "FlashCheckpointIO",
        "FlashTrainer",
        "frozen=base",
        "tp{tp_rank}",
        'dcp.load(state, checkpoint_id="/',
    )
    assert {block("docs/checkpoint.md", one) for one in words} == set(_blocks("docs/checkpoint.md"))


def first() -> list[Sequence[str]]:
    """The page's first example, twice, and torch alone."""
    code = block("docs/checkpoint.md", "extra=loader")
    loads = block("docs/checkpoint.md", 'checkpoint_id="/')
    weights = "print(model[0].weight.sum().item().hex())"
    trains = (MODEL, LOADER, FILES, code, "print(step, ckpt.tier, whole('/ckpts/run1'), loader.position)", weights)
    return [trains, trains, (MODEL, loads, weights)]


def readme() -> list[Sequence[str]]:
    """The README's example, twice."""
    data = "data = [torch.randn(4, 8) for _ in range(30)]"
    return [(MODEL, data, block("README.md", "FlashCheckpoint("), "print(step, ckpt.tier)")] * 2


def torchs_own_calls() -> Sequence[str]:
    """The example of torch.distributed.checkpoint."""
    code = block("docs/checkpoint.md", "FlashStager()")
    prelude = """
    import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
    dist.init_process_group("gloo", init_method="file:///ckpts.store", rank=0, world_size=1)
    state, step = {"w": torch.arange(8.0), "epoch": 3}, 7
    """
    saves, loads = code.split("dcp.load(")
    waits = saves.replace("dcp.async_save(", "done = dcp.async_save(") + "done.result()\nstate['w'].zero_()\n"
    after = "print(state['w'].sum().item(), whole('/ckpts/run1'))\ndist.destroy_process_group()"
    return (prelude, FILES, waits, f"dcp.load({loads}", after)


def frozen() -> Sequence[str]:
    """The example of a frozen base."""
    code = block("docs/checkpoint.md", "frozen=base")
    after = """
    for step in range(1, 11):
        loss_of(model, torch.randn(4, 8)).backward()
        adapters.step()
        ckpt.step(step)
    ckpt.wait()
    print(ckpt.stats.saves, ckpt.stats.live_bytes == sum(one.nbytes for one in model.buffers()))
    ckpt.close()
    """
    return (MODEL, "model[0].requires_grad_(False)", code, after)


def shards() -> Sequence[str]:
    """The example of shards in plain tensors, on a rank that has all of them."""
    code = block("docs/checkpoint.md", "tp{tp_rank}")
    after = "assert ckpt.restore() == 0 and ckpt.save(7)\nckpt.close()\nprint(whole('/ckpts/run1'))"
    return (MODEL, FILES, "url, tp_rank = '/ckpts/run1', 0", IMPORT, code, after)


def test_scripts(tmp_path: Path) -> None:
    """What needs nothing but torch, in turn, each script in a process of its own.

    The first example trains to the end; run again it has nothing left to do, and all is as it was; torch loads it alone. That of
    the README makes thirty steps and thirty more: the second run goes on where the first one ended. That of
    torch.distributed.checkpoint saves a step, and loads it. In that of a frozen base nothing but buffers is copied while
    training stands. That of shards saves a step.
    """
    scripts = {
        "first": first(),
        "readme": readme(),
        "torch": [torchs_own_calls()],
        "frozen": [frozen()],
        "tp": [shards()],
    }
    told = run(tmp_path, scripts)
    begun, again, loaded = told["first"]
    assert begun.split()[:-1] == ["40", "nothing", "['step-0000000040']", "40"]
    assert again.split() == ["40", "storage", *begun.split()[2:]]
    assert loaded.split() == begun.split()[-1:]
    assert [one.split() for one in told["readme"]] == [["30", "nothing"], ["60", "storage"]]
    assert told["torch"][0].split() == ["28.0", "['step-0000000007']"]
    assert told["frozen"][0].split() == ["1", "True"]
    assert told["tp"][0].split() == ["['step-0000000007']"]


@pytest.mark.nightly(reason="test_lightning.py stands for it in make test")
@pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="needs lightning")
def test_lightning(tmp_path: Path) -> None:
    """The example of Lightning fits, and a second run, for longer, goes on after the first one's last step."""
    code, tells = block("docs/checkpoint.md", "FlashCheckpointIO"), "print(model.steps[0], len(model.steps))"
    longer = code.replace("max_steps=40", "max_steps=60")
    scripts = {"lightning": [(LIGHTNING, code, tells), (LIGHTNING, longer, tells)]}
    first, second = run(tmp_path, scripts, imported="lightning.pytorch")["lightning"]
    assert (first.split()[-2:], second.split()[-2:]) == (["0", "40"], ["40", "20"])


@pytest.mark.nightly(reason="test_huggingface.py stands for it in make test")
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers and accelerate")
def test_hugging_face(tmp_path: Path) -> None:
    """The example of Hugging Face's Trainer trains, and leaves a checkpoint."""
    code = block("docs/checkpoint.md", "FlashTrainer")
    script = (HUGGINGFACE, FILES, code, "print(trainer.state.global_step, len(whole('/ckpts/run1')))")
    (told,) = run(tmp_path, {"trainer": [script]})["trainer"]
    assert told.split()[-2:] == ["12", "1"]
