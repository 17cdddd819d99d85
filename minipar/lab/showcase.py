"""The picture that README opens with: `python -m minipar.lab.showcase`.

One training step of the same Llama, on the same ranks and the same emulated link: once with one
all-reduce per parameter after backward, once with buckets that travel while backward goes on.
"""

import torch

from minipar.comm.collectives import barrier
from minipar.comm.mesh import Mesh
from minipar.emulate import link
from minipar.lab import draw
from minipar.lab.bench.strategies import ADAMW
from minipar.model.llama import PRESETS, Llama
from minipar.observe import timeline
from minipar.observe.timeline import Timeline
from minipar.parallel import ddp
from minipar.ranks.launch import Ranks
from minipar.train.step import train_step

VERSIONS: dict[str, ddp.Version] = {
    "One all-reduce per parameter, after backward": "naive",
    "Buckets, while backward goes on": "overlapped",
}
LINK, OUT = "1gbe", "notebooks/assets/naive_and_overlapped.png"


def median_step(version: ddp.Version) -> Timeline:
    """Return the timeline, of all ranks, of the step of median length; called on every rank."""
    mesh, shape = Mesh(dp=2), PRESETS["small"]
    link.use(link.parse(LINK))
    link.check_calls(False)
    stream = torch.Generator().manual_seed(mesh.rank)
    tokens = torch.randint(shape.vocab_size, (4, 129), generator=stream)
    batch = [(tokens[:, :-1], tokens[:, 1:].contiguous())]
    model = Llama(shape)
    strategy = ddp.apply(model, mesh.dp, version=version, average=False)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    steps = []
    for _ in range(8):
        barrier(mesh.world)
        with timeline.record(model) as recorded:
            train_step(model, [strategy], optimizer, batch, mesh.dp)
        steps.append(recorded.gather(mesh.world).shifted())
    chosen = sorted(steps[3:], key=lambda step: step.duration)[2]  # the first three warm up
    chosen.label = f"measured, {mesh.size} ranks, {link.current().label}"
    return chosen


def main() -> None:
    """Measure, draw, and print what the picture shows."""
    with Ranks(2, backend="link", sink=None) as ranks:
        steps = {title: ranks.run(median_step, name)[0] for title, name in VERSIONS.items()}
    for title, step in steps.items():
        print(f"{title}\n{step}\n")
    print(f"drawn into {draw.save(draw.before_after(steps), OUT)}")


if __name__ == "__main__":
    from minipar.lab import showcase  # by its name, which the ranks can import, too

    showcase.main()
