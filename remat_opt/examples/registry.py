"""Every example network by name, with the batch and input size at which it is measured, and a small twin for tests.

A new family is one file with a table of its networks, and its rows here.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial

import flax.linen as nn
import jax.numpy as jnp

from remat_opt.examples import data
from remat_opt.examples.alexnet import ALEXNETS, AlexNet
from remat_opt.examples.cells import AMOEBANET, CELL_NETWORKS, DARTS, NASNET, CellNetwork
from remat_opt.examples.deep_resnet import DEEP_RESNETS, PreActivationResNet
from remat_opt.examples.densenet import DENSENETS, DenseNet
from remat_opt.examples.gpt import GPT, GPTS
from remat_opt.examples.inception import INCEPTIONS, InceptionV3
from remat_opt.examples.lstm import LSTM, LSTMS
from remat_opt.examples.random_wiring import RANDOMLY_WIRED, RandomlyWired
from remat_opt.examples.resnet import RESNETS, BasicBlock, BottleneckBlock, ResNet
from remat_opt.examples.training import MakeBatch, TrainingExample, training_example
from remat_opt.examples.translation import TRANSLATORS, Translator
from remat_opt.examples.unet import UNETS, UNet
from remat_opt.examples.vgg import VGG, VGGS
from remat_opt.examples.vit import VITS, VisionTransformer
from remat_opt.examples.wide_resnet import WIDE_RESNETS, WideResNet

MakeNetwork = Callable[..., nn.Module]


class Task(Enum):
    """What goes in and what is learnt; `size` is the side of an image in pixels, or a number of tokens or frames."""

    IMAGES = "images (batch, size, size, 3) → a class each"
    PIXELS = "grey images (batch, size, size, 1) → a class for each pixel"
    TEXT = "tokens (batch, size) → the next one of each"
    TRANSLATION = "two sequences of tokens (batch, size) → the next one of each of the second"
    FRAMES = "frames (size, batch, 50) → a class each"

    def batches(self, batch: int, size: int, classes: int, dtype: jnp.dtype) -> MakeBatch:
        """The function that makes (inputs, labels) from a key."""
        match self:
            case Task.IMAGES:
                return lambda key: data.pattern_images(key, (batch, size, size, 3), dtype, classes)
            case Task.PIXELS:
                return lambda key: data.blob_images(key, (batch, size, size, 1), dtype, classes)
            case Task.TEXT:
                return lambda key: data.counting_text(key, (batch, size), classes)
            case Task.TRANSLATION:
                return lambda key: data.mirrored_text(key, (batch, size), classes)
            case Task.FRAMES:
                return lambda key: data.spoken_frames(key, (size, batch, 50), dtype, classes)


@dataclass(frozen=True)
class Example:
    """A network as it is measured: with the batch, size (see `Task`) and number of classes of `source`.

    `network` and `small`, its twin for tests at `small_size`, take `num_classes`, `dtype` and `remat`.
    """

    task: Task
    network: MakeNetwork
    batch: int
    size: int
    classes: int
    source: str
    small: MakeNetwork
    small_size: int


def _family(
    task: Task,
    networks: Mapping[str, MakeNetwork],
    *,
    batch: int | Mapping[str, int],
    size: int,
    classes: int,
    source: str,
    small: MakeNetwork | Mapping[str, MakeNetwork],
    small_size: int,
) -> dict[str, Example]:
    """The examples of one file; batches and small twins are given together or one for each name."""

    def one(name: str) -> Example:
        its_batch = batch if isinstance(batch, int) else batch[name]
        twin = small[name] if isinstance(small, Mapping) else small
        return Example(task, networks[name], its_batch, size, classes, source, twin, small_size)

    return {name: one(name) for name in networks}


def _scanned(kind: MakeNetwork, *sizes: int, names: Mapping[str, MakeNetwork]) -> dict[str, MakeNetwork]:
    return {name: partial(kind, *sizes, scan=name.endswith("_scan")) for name in names}


def _only(networks: Mapping[str, MakeNetwork], *names: str) -> dict[str, MakeNetwork]:
    return {name: networks[name] for name in names}


_FENG_HUANG = "Feng & Huang, arXiv 1808.00079, and their repository's table"
_CHEN = "Chen et al., arXiv 1604.06174, sections 5.2 and 5.3"
_IMAGENET = {"size": 224, "classes": 1000}
_CIFAR = {"size": 32, "classes": 10}
_SMALL_RESNETS: dict[str, MakeNetwork] = {
    name: partial(ResNet, BasicBlock if name in ("resnet18", "resnet34") else BottleneckBlock, (1, 1, 1, 1))
    for name in RESNETS
}
_SMALL_CELLS: dict[str, MakeNetwork] = {
    name: partial(CellNetwork, cells, channels=4, layers=3)
    for name, cells in {"nasnet": NASNET, "amoebanet": AMOEBANET, "darts": DARTS}.items()
}
_SMALL_DYNAMIC = partial(Translator, (3,), (3,), 16, 32, 2)

EXAMPLES: dict[str, Example] = {
    **_family(
        Task.IMAGES,
        ALEXNETS,
        batch=1024,
        **_IMAGENET,
        source=_FENG_HUANG,
        small=partial(AlexNet, classifier_width=32),
        small_size=64,
    ),
    **_family(
        Task.IMAGES,
        VGGS,
        batch=64,
        **_IMAGENET,
        source=_FENG_HUANG,
        small=partial(VGG, (1, 1, 1, 1, 1), classifier_width=32),
        small_size=32,
    ),
    **_family(
        Task.IMAGES,
        RESNETS,
        batch={"resnet18": 256, "resnet34": 128, "resnet50": 64, "resnet101": 32, "resnet152": 16},
        **_IMAGENET,
        source=_FENG_HUANG,
        small=_SMALL_RESNETS,
        small_size=32,
    ),
    **_family(
        Task.IMAGES,
        DENSENETS,
        batch={"densenet121": 32, "densenet161": 16, "densenet169": 32, "densenet201": 16},
        **_IMAGENET,
        source=_FENG_HUANG,
        small=partial(DenseNet, 4, 8, (2, 2, 2, 2)),
        small_size=32,
    ),
    **_family(
        Task.IMAGES,
        INCEPTIONS,
        batch=32,
        size=300,
        classes=1000,
        source=_FENG_HUANG,
        small=partial(InceptionV3, pool_features=(8,), widths=(8,), blocks_c=1),
        small_size=75,
    ),
    **_family(Task.IMAGES, CELL_NETWORKS, batch=64, **_CIFAR, source=_FENG_HUANG, small=_SMALL_CELLS, small_size=8),
    **_family(
        Task.IMAGES,
        DEEP_RESNETS,
        batch=32,
        **_IMAGENET,
        source=_CHEN,
        small=partial(PreActivationResNet, (2, 1), width=4),
        small_size=32,
    ),
    **_family(
        Task.IMAGES,
        WIDE_RESNETS,
        batch=128,
        **_CIFAR,
        source="Zagoruyko & Komodakis, arXiv 1605.07146",
        small=partial(WideResNet, 10, 1),
        small_size=8,
    ),
    **_family(
        Task.IMAGES,
        RANDOMLY_WIRED,
        batch=32,
        **_IMAGENET,
        source="Xie et al., arXiv 1904.01569: 256 images on 8 devices",
        small={
            "randwire_small": partial(RandomlyWired, 4, False, nodes=6, head=16),
            "randwire_regular": partial(RandomlyWired, 4, True, nodes=6, head=16),
        },
        small_size=32,
    ),
    **_family(
        Task.PIXELS,
        UNETS,
        batch=8,
        size=572,
        classes=2,
        source="Ronneberger et al., arXiv 1505.04597, whose batch is 1; 8 here",
        small=partial(UNet, features=4, depth=2),
        small_size=44,
    ),
    **_family(
        Task.IMAGES,
        VITS,
        batch=64,
        **_IMAGENET,
        source="Dosovitskiy et al., arXiv 2010.11929: 4,096 images on many devices; 64 here",
        small=_scanned(VisionTransformer, 2, 16, 2, 4, names=VITS),
        small_size=8,
    ),
    **_family(
        Task.TEXT,
        _only(GPTS, "gpt2", "gpt2_scan"),
        batch=8,
        size=1024,
        classes=50257,
        source="Radford et al., 2019: 512 texts on many devices; 8 here",
        small=_scanned(GPT, 2, 16, 2, 16, names=GPTS),
        small_size=8,
    ),
    **_family(
        Task.TEXT,
        _only(GPTS, "gpt_1b_scan"),
        batch=8,
        size=2048,
        classes=50257,
        source="GPT-3 XL of Brown et al., arXiv 2005.14165: 512 texts on many devices; 8 here",
        small=partial(GPT, 2, 16, 2, 16, 0, scan=True),
        small_size=8,
    ),
    **_family(
        Task.TEXT,
        _only(GPTS, "gpt", "gpt_scan"),
        batch=8,
        size=512,
        classes=8192,
        source="the size at which PyTorch's partitioner was measured",
        small=_scanned(GPT, 2, 16, 2, 16, 0, names=GPTS),
        small_size=8,
    ),
    **_family(
        Task.TRANSLATION,
        _only(TRANSLATORS, "dynamicconv_iwslt"),
        batch=125,
        size=32,
        classes=6632,
        source="Wu et al., arXiv 1901.10430, and Sohoni et al., arXiv 1904.10631: 4,000 tokens of IWSLT'14",
        small=partial(_SMALL_DYNAMIC, source_classes=20),
        small_size=8,
    ),
    **_family(
        Task.TRANSLATION,
        _only(TRANSLATORS, "dynamicconv_wmt"),
        batch=112,
        size=32,
        classes=32768,
        source="Wu et al., arXiv 1901.10430: 3,584 tokens of WMT'14 on each of 128 devices",
        small=partial(_SMALL_DYNAMIC, gated=True),
        small_size=8,
    ),
    **_family(
        Task.TRANSLATION,
        _only(TRANSLATORS, "transformer_base", "transformer_big"),
        batch=100,
        size=32,
        classes=37000,
        source="Vaswani et al., arXiv 1706.03762: 25,000 tokens of WMT'14 on 8 devices",
        small=partial(Translator, (0,), (0,), 16, 32, 2),
        small_size=8,
    ),
    **_family(
        Task.FRAMES,
        _only(LSTMS, "lstm"),
        batch=64,
        size=64,
        classes=5000,
        source=_CHEN,
        small=_scanned(LSTM, 2, 8, names=LSTMS),
        small_size=4,
    ),
    **_family(
        Task.FRAMES,
        _only(LSTMS, "lstm_scan"),
        batch=64,
        size=1000,
        classes=5000,
        source=f"{_CHEN}; 1,000 frames as in the authors' script",
        small=_scanned(LSTM, 2, 8, names=LSTMS),
        small_size=4,
    ),
}

NETWORKS: dict[str, MakeNetwork] = {
    name: example.network for name, example in EXAMPLES.items() if example.task is Task.IMAGES
}
"""The image classifiers: name → constructor taking `num_classes`, `dtype` and `remat`."""


def make_example(
    name: str,
    *,
    batch: int | None = None,
    size: int | None = None,
    classes: int | None = None,
    remat: bool = False,
    dtype: jnp.dtype = jnp.float32,
    learning_rate: float | None = None,
    small: bool = False,
    wrap: Callable[[type[nn.Module]], Callable[..., nn.Module]] | None = None,
) -> TrainingExample:
    """The training step of one of `EXAMPLES`, by default at its source's batch and size.

    Nothing is allocated. Parameters are float32 and `dtype` is that of the computation.

    Args:
        name: one of `EXAMPLES`.
        batch: images or sequences in a batch.
        size: of an input, see `Task`.
        classes: to tell apart, or tokens in the vocabulary.
        remat: wrap every block in `nn.remat` by hand.
        dtype: of the computation.
        learning_rate: by default the image networks' papers', 0.1 with batch norm, 0.01 without.
        small: the twin for tests, by default with a batch of 2 and 4 classes (16 tokens).
        wrap: what the whole network's class is replaced with.
    """
    example = EXAMPLES.get(name)
    if example is None:
        raise ValueError(f"unknown network {name!r}; known are {', '.join(sorted(EXAMPLES))}")
    task = example.task
    text = task in (Task.TEXT, Task.TRANSLATION)
    usual = (2, example.small_size, 16 if text else 4) if small else (example.batch, example.size, example.classes)
    batch, size, classes = (
        default if given is None else given for given, default in zip((batch, size, classes), usual, strict=True)
    )
    make = example.small if small else example.network
    network = make(num_classes=classes, dtype=dtype, remat=remat)
    if wrap is not None:
        fields = (field.name for field in dataclasses.fields(network) if field.name not in ("parent", "name"))
        network = wrap(type(network))(**{field: getattr(network, field) for field in fields})
    # Parameters do not depend on how long a sequence is.
    shortest = size if task in (Task.IMAGES, Task.PIXELS) else 1
    batches = task.batches(batch, size, classes, dtype)
    return training_example(name, network, batches, task.batches(1, shortest, classes, dtype), learning_rate)


def image_classifier(
    name: str,
    *,
    batch: int,
    size: int = 224,
    classes: int = 1000,
    remat: bool = False,
    dtype: jnp.dtype = jnp.float32,
    learning_rate: float | None = None,
    wrap: Callable[[type[nn.Module]], Callable[..., nn.Module]] | None = None,
) -> TrainingExample:
    """The training step of one of `NETWORKS` on images (batch, size, size, 3); see `make_example`."""
    if name not in NETWORKS:
        raise ValueError(f"unknown network {name!r}; known are {', '.join(sorted(NETWORKS))}")
    return make_example(
        name,
        batch=batch,
        size=size,
        classes=classes,
        remat=remat,
        dtype=dtype,
        learning_rate=learning_rate,
        wrap=wrap,
    )
