"""`minipar export` and `minipar generate`: what a run has learned, used elsewhere."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro

from minipar.cli.training import checkpoint_of, run_of, typed_path
from minipar.model import hf
from minipar.model.llama import Llama
from minipar.ranks.backends import compute_device
from minipar.train import checkpoint
from minipar.train.config import TrainConfig, check_numbers
from minipar.train.sampling import write
from minipar.train.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer, try_out


@dataclass(frozen=True)
class Export:
    """Write the weights of a run as Hugging Face's libraries, and --init of training, read them."""

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    """Folder of the run, or of one of its checkpoints."""
    folder: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="FOLDER")]
    """Where to write config.json, model.safetensors and tokenizer.json."""
    overwrite: bool = False
    """Whether weights that are in FOLDER may go."""


@dataclass(frozen=True)
class Generate:
    """Let a trained model go on with a text, on this process alone."""

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """Folder of a run, of one of its checkpoints, or of a model as Hugging Face's libraries write
    it."""
    prompt: str = "\n"
    """What it goes on with."""
    tokens: int = 200
    """How many to write."""
    temperature: float = 0.8
    """0 takes the likeliest token, 1 draws as the model says."""
    top_k: int = 40
    """Draw among so many of the likeliest tokens."""
    seed: int = 0
    """Of the draw."""

    def check(self) -> None:
        """Raise `ValueError` for values that cannot work."""
        check_numbers(self, {"tokens": 1, "temperature": 0, "top_k": 1})
        if not self.prompt:
            raise ValueError("--prompt is empty; a model needs something to go on with")


def export(command: Export) -> None:
    """Write the newest weights of a run as a Hugging Face folder, with its tokenizer.

    That is the file in the folder of the run. What its configuration names may be any file of this
    machine, if the run is a stranger's.
    """
    run, folder = run_of(command.run, "export"), Path(command.folder)
    if (folder / "checkpoints").is_dir():
        raise ValueError(f"export: {folder} is a run, and would lose its config.json; name another")
    if any(folder.glob("model*.safetensors")) and not command.overwrite:
        raise ValueError(
            f"export: {folder} has weights already; name another folder, or say --overwrite"
        )
    start = checkpoint_of(typed_path(command.run), "export")
    tokenizer = _tokenizer_of(run, "export")
    try:
        checkpoint.export(start, folder)
    except OSError as error:
        raise ValueError(f"export: cannot write {folder}: {error}") from None
    tokenizer.save(folder / "tokenizer.json")
    # Or transformers would take the tokenizer of a Llama, which has other rules for blanks.
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind) + "\n", encoding="utf-8")
    print(f"{start} -> {folder}/: config.json, safetensors and tokenizer.json")


def _tokenizer_of(run: Path, asked: str) -> Tokenizer:
    """Return that of a run: the file in its folder, or bytes."""
    own = None
    if (named := TrainConfig.load(run / "config.json").tokenizer) != "":
        own = run / "tokenizer.json"
        if not own.is_file():
            raise ValueError(f"{asked} {run}: it has no tokenizer.json; copy {named} to {own}")
        try_out(own)
    return load_tokenizer(own)


def generate(command: Generate) -> None:
    """Print the prompt and what the model makes of it; the model is a run's, or any Llama."""
    command.check()
    path = typed_path(command.model)
    if path.parent.name == "checkpoints" or (path / "checkpoints").is_dir():
        tokenizer = _tokenizer_of(run_of(command.model, "generate"), "generate")
        weights, shape = checkpoint.model_of(checkpoint_of(path, "generate"))
        with torch.device("meta"):
            model = Llama(shape)
        checkpoint.check_weights(model, weights, f"checkpoint {path}")
        model = hf.fill(model, weights).float()
    else:
        if not path.is_dir():
            raise ValueError(f"generate {path} does not exist; name a run, or what export wrote")
        own = path / "tokenizer.json"
        vocab_size = hf.load_config(path).vocab_size
        own = None if ByteTokenizer.wrote(own, vocab_size) else own
        if own:
            try_out(own)
        tokenizer, model = load_tokenizer(own), hf.load(path)
    start = torch.tensor(list(tokenizer.encode(command.prompt)))
    options = command.tokens, command.seed, command.temperature, command.top_k
    prompt, text = write(model.to(compute_device()), tokenizer, start, *options)
    print(f"{prompt}{text}")
