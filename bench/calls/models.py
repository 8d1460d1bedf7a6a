"""Published models, and the sizes from which the shapes of their calls follow.

The figures are those of the papers and of the configurations that were published with the weights.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Transformer:
    """The encoder or decoder of a transformer.

    Attributes:
      name: what it is known as.
      width: the size of hidden states.
      heads: of queries.
      head_dim: the size of each.
      hidden: the width inside the feed-forward layers; of one expert, if there are experts.
      length: the longest sequence it is made for.
      mask: "causal", "padding" for sequences of different lengths, or None.
      vocabulary: how many tokens or classes it predicts; 0 if none.
      activation: of the feed-forward layers, as `jax_gpuops.linear` calls it.
      gated: True if the activation is that of a gate.
      bias: True if dense layers have one.
      key_heads: of keys and values; 0 for as many as of queries.
      experts: among which a router chooses; 0 for none.
      lengths: the only lengths of its sequences; empty for any up to `length`.
    """

    name: str
    width: int
    heads: int
    head_dim: int
    hidden: int
    length: int
    mask: str | None
    vocabulary: int = 0
    activation: str = "silu"
    gated: bool = False
    bias: bool = True
    key_heads: int = 0
    experts: int = 0
    lengths: tuple[int, ...] = ()


def _llama(
    name, width, heads, key_heads, head_dim, hidden, length, vocabulary, activation="silu",
    experts=0,
) -> Transformer:  # fmt: skip
    """A decoder with gated layers and without biases."""
    return Transformer(
        name, width, heads, head_dim, hidden, length, "causal", vocabulary, activation,
        gated=True, bias=False, key_heads=key_heads, experts=experts,
    )  # fmt: skip


def _gpt(
    name, width, heads, head_dim, hidden, length, vocabulary, activation="gelu"
) -> Transformer:
    """A decoder with biases."""
    return Transformer(
        name, width, heads, head_dim, hidden, length, "causal", vocabulary, activation
    )


def _bert(
    name, width, heads, head_dim, hidden, length, vocabulary, activation="gelu_exact", **options
) -> Transformer:
    """An encoder of sentences, of which a batch has some of different lengths."""
    return Transformer(
        name, width, heads, head_dim, hidden, length, "padding", vocabulary, activation, **options
    )


def _vit(
    name, width, heads, head_dim, hidden, lengths, classes=0, activation="gelu_exact"
) -> Transformer:
    """An encoder of patches, whose number is that of the image's size."""
    return Transformer(
        name, width, heads, head_dim, hidden, max(lengths), None, classes, activation,
        lengths=lengths,
    )  # fmt: skip


DECODERS = (
    _llama("Llama 2 7B", 4096, 32, 32, 128, 11008, 4096, 32000),
    _llama("Llama 2 13B", 5120, 40, 40, 128, 13824, 4096, 32000),
    _llama("Llama 3 8B", 4096, 32, 8, 128, 14336, 8192, 128256),
    _llama("Llama 3.1 70B", 8192, 64, 8, 128, 28672, 131072, 128256),
    _llama("Llama 3.2 1B", 2048, 32, 8, 64, 8192, 131072, 128256),
    _llama("TinyLlama 1.1B", 2048, 32, 4, 64, 5632, 2048, 32000),
    _llama("Mistral 7B", 4096, 32, 8, 128, 14336, 8192, 32000),
    _llama("Mixtral 8x7B", 4096, 32, 8, 128, 14336, 32768, 32000, experts=8),
    _llama("Qwen2.5 0.5B", 896, 14, 2, 64, 4864, 32768, 151936),
    _llama("Qwen2.5 1.5B", 1536, 12, 2, 128, 8960, 32768, 151936),
    _llama("Qwen2.5 7B", 3584, 28, 4, 128, 18944, 32768, 152064),
    _llama("Qwen3 0.6B", 1024, 16, 8, 128, 3072, 32768, 151936),
    _llama("Qwen3 8B", 4096, 32, 8, 128, 12288, 32768, 151936),
    _llama("Qwen3 30B-A3B", 2048, 32, 4, 128, 768, 32768, 151936, experts=128),
    _llama("Gemma 2 2B", 2304, 8, 4, 256, 9216, 8192, 256000, "gelu"),
    _llama("Gemma 2 9B", 3584, 16, 8, 256, 14336, 8192, 256000, "gelu"),
    _llama("Gemma 3 1B", 1152, 4, 1, 256, 6912, 32768, 262144, "gelu"),
    _llama("Phi-3 mini", 3072, 32, 32, 96, 8192, 4096, 32064),
    _llama("SmolLM2 135M", 576, 9, 3, 64, 1536, 8192, 49152),
    _llama("DeepSeekMoE 16B", 2048, 16, 16, 128, 1408, 4096, 102400, experts=64),
    _llama("OLMoE 1B-7B", 2048, 16, 16, 128, 1024, 4096, 50304, experts=64),
    _gpt("GPT-2", 768, 12, 64, 3072, 1024, 50257),
    _gpt("GPT-2 medium", 1024, 16, 64, 4096, 1024, 50257),
    _gpt("GPT-2 large", 1280, 20, 64, 5120, 1024, 50257),
    _gpt("GPT-2 XL", 1600, 25, 64, 6400, 1024, 50257),
    _gpt("GPT-J 6B", 4096, 16, 256, 16384, 2048, 50400),
    _gpt("Pythia 410M", 1024, 16, 64, 4096, 2048, 50304, "gelu_exact"),
    _gpt("Pythia 1.4B", 2048, 16, 128, 8192, 2048, 50304, "gelu_exact"),
    _gpt("Pythia 6.9B", 4096, 32, 128, 16384, 2048, 50432, "gelu_exact"),
    _gpt("OPT 1.3B", 2048, 32, 64, 8192, 2048, 50272, "relu"),
    _gpt("OPT 6.7B", 4096, 32, 128, 16384, 2048, 50272, "relu"),
    _gpt("BLOOM 560M", 1024, 16, 64, 4096, 2048, 250880),
    _gpt("Phi-2", 2560, 32, 80, 10240, 2048, 51200),
    _gpt("MusicGen medium", 1536, 24, 64, 6144, 1500, 2048, "gelu_exact"),
    _gpt("CLIP ViT-L/14, text", 768, 12, 64, 3072, 77, 49408),
    _gpt("Whisper small, decoder", 768, 12, 64, 3072, 448, 51865, "gelu_exact"),
    _gpt("Whisper large, decoder", 1280, 20, 64, 5120, 448, 51865, "gelu_exact"),
)

ENCODERS = (
    _bert("BERT base", 768, 12, 64, 3072, 512, 30522),
    _bert("BERT large", 1024, 16, 64, 4096, 512, 30522),
    _bert("RoBERTa base", 768, 12, 64, 3072, 512, 50265),
    _bert("RoBERTa large", 1024, 16, 64, 4096, 512, 50265),
    _bert("XLM-R base", 768, 12, 64, 3072, 512, 250002),
    _bert("MiniLM L6", 384, 12, 32, 1536, 512, 30522),
    _bert("ModernBERT base", 768, 12, 64, 1152, 8192, 50368, gated=True, bias=False),
    _bert("T5 base", 768, 12, 64, 3072, 512, 32128, "relu", bias=False),
    _bert("T5 large", 1024, 16, 64, 4096, 512, 32128, "relu", bias=False),
    _bert("Flan-T5 XL", 2048, 32, 64, 5120, 512, 32128, "gelu", gated=True, bias=False),
    _bert("BART large", 1024, 16, 64, 4096, 1024, 50265),
    _bert("ESM-2 650M", 1280, 20, 64, 5120, 1024, 33),
    _bert("wav2vec 2.0 base", 768, 12, 64, 3072, 1500, 32, lengths=(499, 781, 1499)),
    _bert("BERT4Rec", 64, 2, 32, 256, 200, 26744, "gelu"),
)

PATCH_ENCODERS = (
    _vit("ViT-B/16", 768, 12, 64, 3072, (197, 577), 1000),
    _vit("ViT-L/16", 1024, 16, 64, 4096, (197, 577), 1000),
    _vit("ViT-L/16, ImageNet-21k", 1024, 16, 64, 4096, (197,), 21843),
    _vit("ViT-H/14", 1280, 16, 80, 5120, (257,), 1000),
    _vit("DeiT-Ti", 192, 3, 64, 768, (197,), 1000),
    _vit("DeiT-S", 384, 6, 64, 1536, (197,), 1000),
    _vit("CLIP ViT-B/32", 768, 12, 64, 3072, (50,)),
    _vit("CLIP ViT-L/14", 1024, 16, 64, 4096, (257,)),
    _vit("DINOv2 ViT-S/14", 384, 6, 64, 1536, (257, 1370)),
    _vit("DINOv2 ViT-L/14", 1024, 16, 64, 4096, (257, 1370)),
    _vit("SAM ViT-H", 1280, 16, 80, 5120, (196, 4096)),
    _vit("Whisper tiny, encoder", 384, 6, 64, 1536, (1500,)),
    _vit("Whisper large, encoder", 1280, 20, 64, 5120, (1500,)),
    _vit("DiT-XL/2", 1152, 16, 72, 4608, (256, 1024), 0, "gelu"),
    _vit("DETR R50, encoder", 256, 8, 32, 2048, (850,), 92, "relu"),
)
"""Also of sound: their sequences are equally long."""


@dataclasses.dataclass(frozen=True)
class CrossAttention:
    """Attention of some positions to others.

    Attributes:
      name: what the model is known as.
      heads: how many.
      head_dim: the size of each.
      sizes: pairs of the number of queries and of keys.
    """

    name: str
    heads: int
    head_dim: int
    sizes: tuple[tuple[int, int], ...]


CROSS_ATTENTION = (
    CrossAttention("Stable Diffusion 1.5, 64 x 64", 8, 40, ((4096, 77), (4096, 4096))),
    CrossAttention("Stable Diffusion 1.5, 32 x 32", 8, 80, ((1024, 77), (1024, 1024))),
    CrossAttention("Stable Diffusion 1.5, 16 x 16", 8, 160, ((256, 77), (256, 256))),
    CrossAttention("SDXL, 64 x 64", 10, 64, ((4096, 77), (4096, 4096))),
    CrossAttention("SDXL, 32 x 32", 20, 64, ((1024, 77), (1024, 1024))),
    CrossAttention("Whisper large, decoder", 20, 64, ((448, 1500), (1, 1500))),
    CrossAttention("Whisper tiny, decoder", 6, 64, ((448, 1500), (1, 1500))),
    CrossAttention("DETR R50, decoder", 8, 32, ((100, 850), (100, 100))),
    CrossAttention("BART large, decoder", 16, 64, ((1024, 1024), (128, 1024))),
    CrossAttention("T5 base, decoder", 12, 64, ((114, 512), (512, 512))),
)


@dataclasses.dataclass(frozen=True)
class Windows:
    """Attention inside of many small groups.

    Attributes:
      name: what the model is known as.
      groups: in one example.
      heads: how many.
      head_dim: the size of each.
      length: of a group.
    """

    name: str
    groups: int
    heads: int
    head_dim: int
    length: int


WINDOWS = (
    Windows("Swin-T, stage 1", 64, 3, 32, 49),
    Windows("Swin-T, stage 2", 16, 6, 32, 49),
    Windows("Swin-B, stage 1", 64, 4, 32, 49),
    Windows("Swin-B, stage 3", 4, 16, 32, 49),
    Windows("AlphaFold 2, MSA rows", 128, 8, 32, 256),
    Windows("AlphaFold 2, MSA columns", 256, 8, 32, 128),
    Windows("AlphaFold 2, triangle", 256, 4, 32, 256),
)


@dataclasses.dataclass(frozen=True)
class Maps:
    """The feature maps of a convolutional network.

    Attributes:
      name: what it is known as.
      sizes: channels, height and width of each stage, the last one before the pooling.
      classes: how many it tells apart; 0 if none.
      groups: of channels that are normalised together; 0 for batch norm.
      inner: the channels inside a block, between its 1 x 1 convolutions, relative to those of the
        stage; 0 if it has no such blocks.
    """

    name: str
    sizes: tuple[tuple[int, int, int], ...]
    classes: int = 0
    groups: int = 0
    inner: float = 0


_RESNET = ((64, 112, 112), (256, 56, 56), (512, 28, 28), (1024, 14, 14), (2048, 7, 7))

MAPS = (
    Maps("ResNet-18", ((64, 56, 56), (128, 28, 28), (256, 14, 14), (512, 7, 7)), 1000),
    Maps("ResNet-50", _RESNET, 1000, inner=1 / 4),
    Maps("VGG-16", ((64, 224, 224), (128, 112, 112), (256, 56, 56), (512, 28, 28)), 1000),
    Maps("MobileNetV2", ((32, 112, 112), (144, 56, 56), (192, 28, 28), (1280, 7, 7)), 1000),
    Maps("EfficientNet-B0", ((32, 112, 112), (144, 56, 56), (240, 28, 28), (1280, 7, 7)), 1000),
    Maps("EfficientNet-B7", ((64, 300, 300), (288, 150, 150), (2560, 19, 19)), 1000),
    Maps("ConvNeXt-T", ((96, 56, 56), (192, 28, 28), (384, 14, 14), (768, 7, 7)), 1000, inner=4),
    Maps("ConvNeXt-L", ((192, 56, 56), (384, 28, 28), (768, 14, 14), (1536, 7, 7)), 1000, inner=4),
    Maps("DenseNet-121", ((64, 112, 112), (256, 56, 56), (512, 28, 28), (1024, 7, 7)), 1000),
    Maps("ResNet-20, CIFAR-10", ((16, 32, 32), (32, 16, 16), (64, 8, 8)), 10),
    Maps(
        "Stable Diffusion 1.5",
        ((320, 64, 64), (640, 32, 32), (1280, 16, 16), (1280, 8, 8)),
        groups=32,
    ),
    Maps("SDXL", ((320, 128, 128), (640, 64, 64), (1280, 32, 32)), groups=32),
    Maps("Stable Diffusion VAE", ((128, 512, 512), (256, 256, 256), (512, 64, 64)), groups=32),
)

SEGMENTATION = (
    Maps("DeepLabv3, Pascal VOC", ((21, 513, 513),)),
    Maps("FCN, Cityscapes", ((19, 512, 1024),)),
    Maps("SegFormer-B0, ADE20K", ((150, 128, 128),)),
    Maps("U-Net, cells", ((2, 388, 388),)),
)
"""Their channels are the classes of each pixel."""


@dataclasses.dataclass(frozen=True)
class Perceptron:
    """Dense layers, one after another.

    Attributes:
      name: what the model is known as.
      widths: of the input and of each layer.
      batches: of how many examples.
    """

    name: str
    widths: tuple[int, ...]
    batches: tuple[int, ...]


PERCEPTRONS = (
    Perceptron("DLRM, bottom", (13, 512, 256, 128), (2048, 8192, 65536)),
    Perceptron("DLRM, top", (479, 1024, 1024, 512, 256, 1), (2048, 8192, 65536)),
    Perceptron("LeNet-300-100", (784, 300, 100, 10), (128, 1024, 8192)),
    Perceptron("MLP-Mixer B/16, tokens", (196, 384, 196), (768, 12288, 49152)),
    Perceptron("MLP-Mixer B/16, channels", (768, 3072, 768), (196, 3136, 12544)),
)

DLRM_FEATURES, DLRM_WIDTH = 27, 128
"""What DLRM multiplies with each other: 26 embeddings and the output of the bottom layers."""
