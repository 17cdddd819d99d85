"""`minipar export` and `minipar generate`: what a run has learned, used elsewhere."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro

from minipar.cli.training import found
from minipar.model import hf
from minipar.ranks.backends import compute_device
from minipar.train import checkpoint
from minipar.train.config import TrainConfig, check_numbers
from minipar.train.sampling import write
from minipar.train.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer


@dataclass(frozen=True)
class Export:
    """Write the weights of a run for Hugging Face's libraries, and for --init of training."""

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    """Folder of the run, or of one of its checkpoints."""
    folder: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="FOLDER")]
    """Where to write config.json, model.safetensors and tokenizer.json."""
    overwrite: bool = False
    """Replace weights that are in FOLDER."""


@dataclass(frozen=True)
class Generate:
    """Continue a text with a trained model, on this process alone."""

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """Folder of a run, of one of its checkpoints, or of a Hugging Face model."""
    prompt: str = "\n"
    """The text to go on with."""
    tokens: int = 200
    """Number of tokens to write."""
    temperature: float = 0.8
    """0 takes the likeliest token, 1 draws as the model says."""
    top_k: int = 40
    """Draw among this many of the likeliest tokens."""
    seed: int = 0
    """Seed of the draw."""


def export(command: Export) -> None:
    """Write the newest weights of a run as a Hugging Face folder, with its tokenizer."""
    (run, start), folder = found(command.run, "export"), Path(command.folder)
    if (folder / "checkpoints").is_dir():
        raise ValueError(f"export: {folder} is a run, and would lose its config.json; name another")
    if any(folder.glob("model*.safetensors")) and not command.overwrite:
        raise ValueError(f"export: {folder} has weights already; name another or say --overwrite")
    tokenizer, model = _tokenizer_of(run), checkpoint.model_of(start)
    hf.save(model, folder)
    tokenizer.save(folder / "tokenizer.json")
    print(f"{start} -> {folder}/: config.json, safetensors and tokenizer.json")


def _tokenizer_of(run: Path) -> Tokenizer:
    """Return the tokenizer of a run: the file in its folder, or bytes."""
    named = TrainConfig.load(run / "config.json").tokenizer
    return load_tokenizer(run / "tokenizer.json" if named else None)


def generate(command: Generate) -> None:
    """Print the prompt and what the model makes of it; the model is a run's, or any Llama."""
    check_numbers(command, {"tokens": 1, "temperature": 0, "top_k": 1})
    path = Path(command.model).absolute()
    if path.parent.name == "checkpoints" or (path / "checkpoints").is_dir():
        run, saved = found(command.model, "generate")
        tokenizer, model = _tokenizer_of(run), checkpoint.model_of(saved).float()
    elif path.is_dir():
        own = path / "tokenizer.json"
        reads_bytes = ByteTokenizer.wrote(own, hf.load_config(path).vocab_size)
        tokenizer, model = load_tokenizer(None if reads_bytes else own), hf.load(path)
    else:
        raise ValueError(f"generate {path} is no folder; name a run, or what export wrote")
    start = torch.tensor(list(tokenizer.encode(command.prompt)))
    if not len(start):
        raise ValueError(f"--prompt {command.prompt!r} has no token for the model to go on from")
    options = command.tokens, command.seed, command.temperature, command.top_k
    print(write(model.to(compute_device()), tokenizer, start, *options))
