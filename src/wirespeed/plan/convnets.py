"""Convolutional networks from their configurations: ResNet, VGG and the face detector MogFace.

Every convolution and every normalisation is a layer of its own, as it is in the published code, so that counts of
parameters and tensors can be held against it. Backward order is taken as the reverse of forward order; frameworks move
some tensors by a few places.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from wirespeed.spec.model import Layer, Model, Tensor

_BOTTLENECKS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
_BOTTLENECK_PUBLISHED = {50: 25_557_032, 101: 44_549_160, 152: 60_192_808}
_VGG16 = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)
_TORCHVISION = "torchvision model definitions; He et al. 2015, Simonyan and Zisserman 2014"


class _Net:
    """Layers so far, and the size of the feature map that the next one sees."""

    def __init__(self, height: int, width: int) -> None:
        self.layers: list[Layer] = []
        self.height = height
        self.width = width

    def conv(
        self,
        name: str,
        channels: tuple[int, int],
        kernel: int,
        *,
        stride: int = 1,
        bias: bool = False,
        norm: str | None = None,
        at: tuple[int, int] | None = None,
    ) -> None:
        """A convolution, padded so that only the stride shrinks the map. ``at``: a map beside the main path."""
        inward, outward = channels
        height, width = (self.height, self.width) if at is None else at
        height, width = -(-height // stride), -(-width // stride)
        if at is None:
            self.height, self.width = height, width
        size = outward * height * width
        tensors = [Tensor(name=f"{name}.weight", shape=(outward, inward, kernel, kernel))]
        if bias:
            tensors.append(Tensor(name=f"{name}.bias", shape=(outward,)))
        self.layers.append(
            Layer(name=name, tensors=tuple(tensors), flops=2.0 * size * inward * kernel * kernel, activations=size)
        )
        if norm is not None:
            pair = (Tensor(name=f"{norm}.weight", shape=(outward,)), Tensor(name=f"{norm}.bias", shape=(outward,)))
            self.layers.append(Layer(name=norm, tensors=pair, flops=4.0 * size, activations=size))

    def pool(self) -> None:
        """Halve the map."""
        self.height, self.width = -(-self.height // 2), -(-self.width // 2)

    def linear(self, name: str, inward: int, outward: int) -> None:
        """A fully connected layer with a bias."""
        pair = (Tensor(name=f"{name}.weight", shape=(outward, inward)), Tensor(name=f"{name}.bias", shape=(outward,)))
        self.layers.append(Layer(name=name, tensors=pair, flops=2.0 * inward * outward, activations=outward))


def resnet(depth: Literal[50, 101, 152], *, side: int = 224, num_classes: int = 1000) -> Model:
    """A bottleneck ResNet of version 1.5 (the stride is in the 3x3 convolution), as torchvision has it."""
    net = _Net(side, side)
    _resnet_trunk(net, depth)
    net.linear("fc", 2048, num_classes)
    return Model(
        name=f"resnet{depth}",
        sample=f"image of {side}x{side}",
        layers=tuple(net.layers),
        source=_TORCHVISION,
        published_parameters=_BOTTLENECK_PUBLISHED[depth] if num_classes == 1000 else None,
    )


def _resnet_trunk(net: _Net, depth: Literal[50, 101, 152]) -> list[tuple[int, int, int]]:
    """The stem and four stages; gives (channels, height, width) of every stage's output."""
    net.conv("conv1", (3, 64), 7, stride=2, norm="bn1")
    net.pool()
    inward = 64
    outputs = []
    for stage, num_blocks in enumerate(_BOTTLENECKS[depth], start=1):
        width = 64 * 2 ** (stage - 1)
        for block in range(num_blocks):
            name = f"layer{stage}.{block}"
            stride = 2 if stage > 1 and block == 0 else 1
            entered = (net.height, net.width)
            net.conv(f"{name}.conv1", (inward, width), 1, norm=f"{name}.bn1")
            net.conv(f"{name}.conv2", (width, width), 3, stride=stride, norm=f"{name}.bn2")
            net.conv(f"{name}.conv3", (width, 4 * width), 1, norm=f"{name}.bn3")
            if block == 0:
                side_path = f"{name}.downsample"
                channels = (inward, 4 * width)
                net.conv(f"{side_path}.0", channels, 1, stride=stride, norm=f"{side_path}.1", at=entered)
            inward = 4 * width
        outputs.append((inward, net.height, net.width))
    return outputs


def vgg16(*, norm: bool = False, side: int = 224, num_classes: int = 1000) -> Model:
    """VGG-16, with batch normalisation where ``norm`` asks for it."""
    net = _Net(side, side)
    inward = 3
    for place, width in enumerate(_VGG16):
        if width == 0:
            net.pool()
            continue
        name = f"features.{place}"
        net.conv(name, (inward, width), 3, bias=True, norm=f"{name}.norm" if norm else None)
        inward = width
    net.linear("classifier.0", 512 * 7 * 7, 4096)
    net.linear("classifier.3", 4096, 4096)
    net.linear("classifier.6", 4096, num_classes)
    published = None if num_classes != 1000 else 138_365_992 if norm else 138_357_544
    return Model(
        name="vgg16-bn" if norm else "vgg16",
        sample=f"image of {side}x{side}",
        layers=tuple(net.layers),
        source=_TORCHVISION,
        published_parameters=published,
    )


def mogface(*, height: int = 480, width: int = 640) -> Model:
    """MogFace on a ResNet-101: six pyramid levels, a context module and two deep heads that all levels share.

    The published module holds parameters that its forward pass does not use (side outputs for training, and three of
    the four convolutions of each head, whose place the first one takes four times): they count as parameters, without
    work.
    """
    net = _Net(height, width)
    maps = _resnet_trunk(net, 101)
    deep = maps[-1][1:]
    net.conv("fpn.c6.0", (2048, 512), 1, bias=True, norm="fpn.c6.1", at=deep)
    net.conv("fpn.c6.3", (512, 512), 3, stride=2, bias=True, norm="fpn.c6.4", at=deep)
    sixth = _halved(deep)
    net.conv("fpn.c7.0", (512, 128), 1, bias=True, norm="fpn.c7.1", at=sixth)
    net.conv("fpn.c7.3", (128, 256), 3, stride=2, bias=True, norm="fpn.c7.4", at=sixth)
    sides = [(high, wide) for _, high, wide in maps] + [sixth, _halved(sixth)]
    inputs = (256, 512, 1024, 2048, 512, 256)
    for level, (inward, at) in enumerate(zip(inputs, sides, strict=True)):
        if level < 3:
            net.conv(f"fpn.fuse.{level}", (inward, 256), 1, bias=True, at=at)
        net.conv(f"fpn.lateral.{level}", (256 if level < 3 else inward, 256), 3, bias=True, at=at)
    for level, inward in enumerate((256, 512, 1024, 2048, 256, 256)):
        _shared(net, f"fpn.side.{level}", (inward, 256), ())
    for name, channels in {
        "conv1": (256, 256), "conv2": (256, 128), "conv2_1": (128, 128), "conv2_2": (128, 128), "conv2_2_1": (128, 128),
    }.items():  # fmt: skip
        _shared(net, f"context.{name}", channels, sides)
    for head in ("boxes", "scores"):
        for conv in range(4):
            _shared(net, f"{head}.conv{conv}", (512, 512), 4 * sides if conv == 0 else ())
            pair = tuple(Tensor(name=f"{head}.norm{conv}.{part}", shape=(512,)) for part in ("weight", "bias"))
            net.layers.append(Layer(name=f"{head}.norm{conv}", tensors=pair))
        _shared(net, f"{head}.out", (512, 4 if head == "boxes" else 1), sides)
    return Model(
        name="mogface-large",
        sample=f"image of {width}x{height}",
        layers=tuple(net.layers),
        source="Liu et al., MogFace (CVPR 2022); module of the modelscope package, counted",
        published_parameters=85_260_000,
    )


def _halved(side: tuple[int, int]) -> tuple[int, int]:
    return -(-side[0] // 2), -(-side[1] // 2)


def _shared(net: _Net, name: str, channels: tuple[int, int], sides: Sequence[tuple[int, int]]) -> None:
    """A 3x3 convolution whose weights all levels share: its parameters count once, its work on every level."""
    inward, outward = channels
    size = sum(height * across for height, across in sides) * outward
    pair = (Tensor(name=f"{name}.weight", shape=(outward, inward, 3, 3)), Tensor(name=f"{name}.bias", shape=(outward,)))
    net.layers.append(Layer(name=name, tensors=pair, flops=2.0 * size * inward * 9, activations=size))
