"""Published models, with the sizes that determine the shapes of their calls.

The sizes are from the papers and from the configurations that were published with the weights.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Transformer:
    """The encoder or decoder of a transformer.

    Attributes:
      name: the name of the model.
      width: the size of hidden states.
      heads: the number of query heads.
      head_dim: the size of a head.
      hidden: the width inside the feed-forward layers, or of one expert if there are experts.
      length: the longest sequence.
      mask: "causal", "padding" for sequences of different lengths, or None.
      vocabulary: the number of tokens or classes that it predicts; 0 if none.
      activation: the activation of the feed-forward layers, as `jax_gpuops.linear` names it.
      gated: True if the activation is that of a gate.
      bias: True if dense layers have a bias.
      key_heads: the number of key and value heads; 0 for as many as query heads.
      experts: the number of experts of a router; 0 for none.
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
    name, width, heads, head_dim, hidden, length, vocabulary, activation="gelu", **options
) -> Transformer:
    """A decoder whose layers are not gated."""
    return Transformer(
        name, width, heads, head_dim, hidden, length, "causal", vocabulary, activation, **options
    )


def _bert(
    name, width, heads, head_dim, hidden, length, vocabulary, activation="gelu_exact", **options
) -> Transformer:
    """An encoder of sentences, whose lengths differ within a batch."""
    return Transformer(
        name, width, heads, head_dim, hidden, length, "padding", vocabulary, activation, **options
    )


def _vit(
    name,
    width,
    heads,
    head_dim,
    hidden,
    lengths,
    classes=0,
    activation="gelu_exact",
    **options,
) -> Transformer:
    """An encoder of patches, whose number depends on the size of the image."""
    return Transformer(
        name, width, heads, head_dim, hidden, max(lengths), None, classes, activation,
        lengths=lengths, **options,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class CrossAttention:
    """Attention of some positions to others.

    Attributes:
      name: the name of the model.
      heads: the number of heads.
      head_dim: the size of a head.
      sizes: pairs of the number of queries and of keys.
    """

    name: str
    heads: int
    head_dim: int
    sizes: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class Windows:
    """Attention inside of many small groups.

    Attributes:
      name: the name of the model.
      groups: the number of groups in one example.
      heads: the number of heads.
      head_dim: the size of a head.
      length: the length of a group.
    """

    name: str
    groups: int
    heads: int
    head_dim: int
    length: int


@dataclasses.dataclass(frozen=True)
class Maps:
    """The feature maps of a convolutional network.

    Attributes:
      name: the name of the network.
      sizes: channels, height and width of each stage; the last one is before the pooling.
      classes: the number of classes; 0 if none.
      groups: the number of groups of channels that are normalised together; 0 for batch norm.
      inner: the channels inside a block, between its 1 x 1 convolutions, relative to those of the
        stage; 0 if it has no such blocks.
    """

    name: str
    sizes: tuple[tuple[int, int, int], ...]
    classes: int = 0
    groups: int = 0
    inner: float = 0


@dataclasses.dataclass(frozen=True)
class Perceptron:
    """Dense layers, one after another.

    Attributes:
      name: the name of the model.
      widths: the widths of the input and of each layer.
      batches: the batch sizes.
    """

    name: str
    widths: tuple[int, ...]
    batches: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Models:
    """A group of models.

    Attributes:
      decoders: transformers that predict the next token.
      encoders: encoders of sequences whose lengths differ within a batch, such as sentences.
      patch_encoders: encoders of sequences of equal lengths, such as patches and sound.
      cross_attention: attention of some positions to others.
      windows: attention inside of many small groups.
      maps: convolutional networks.
      segmentation: maps whose channels are the classes of each pixel.
      perceptrons: dense layers alone.
      images: names, and the sides of the images that the models take.
      patches: names, the number of patches per side, the side of a patch, and its channels.
      sequences: names, lengths and widths of sequences that are transposed.
    """

    decoders: tuple[Transformer, ...]
    encoders: tuple[Transformer, ...]
    patch_encoders: tuple[Transformer, ...]
    cross_attention: tuple[CrossAttention, ...]
    windows: tuple[Windows, ...]
    maps: tuple[Maps, ...]
    segmentation: tuple[Maps, ...]
    perceptrons: tuple[Perceptron, ...]
    images: tuple[tuple[str, int], ...]
    patches: tuple[tuple[str, int, int, int], ...]
    sequences: tuple[tuple[str, int, int], ...]

    def __add__(self, other: Models) -> Models:
        """Returns the models of both groups."""
        fields = [each.name for each in dataclasses.fields(self)]
        return Models(*(getattr(self, name) + getattr(other, name) for name in fields))


_RESNET = ((64, 112, 112), (256, 56, 56), (512, 28, 28), (1024, 14, 14), (2048, 7, 7))

FIRST = Models(
    decoders=(
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
    ),
    encoders=(
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
    ),
    patch_encoders=(
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
    ),
    cross_attention=(
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
    ),
    windows=(
        Windows("Swin-T, stage 1", 64, 3, 32, 49),
        Windows("Swin-T, stage 2", 16, 6, 32, 49),
        Windows("Swin-B, stage 1", 64, 4, 32, 49),
        Windows("Swin-B, stage 3", 4, 16, 32, 49),
        Windows("AlphaFold 2, MSA rows", 128, 8, 32, 256),
        Windows("AlphaFold 2, MSA columns", 256, 8, 32, 128),
        Windows("AlphaFold 2, triangle", 256, 4, 32, 256),
    ),
    maps=(
        Maps("ResNet-18", ((64, 56, 56), (128, 28, 28), (256, 14, 14), (512, 7, 7)), 1000),
        Maps("ResNet-50", _RESNET, 1000, inner=1 / 4),
        Maps("VGG-16", ((64, 224, 224), (128, 112, 112), (256, 56, 56), (512, 28, 28)), 1000),
        Maps("MobileNetV2", ((32, 112, 112), (144, 56, 56), (192, 28, 28), (1280, 7, 7)), 1000),
        Maps("EfficientNet-B0", ((32, 112, 112), (144, 56, 56), (240, 28, 28), (1280, 7, 7)), 1000),
        Maps("EfficientNet-B7", ((64, 300, 300), (288, 150, 150), (2560, 19, 19)), 1000),
        Maps(
            "ConvNeXt-T", ((96, 56, 56), (192, 28, 28), (384, 14, 14), (768, 7, 7)), 1000, inner=4
        ),
        Maps(
            "ConvNeXt-L", ((192, 56, 56), (384, 28, 28), (768, 14, 14), (1536, 7, 7)), 1000, inner=4
        ),
        Maps("DenseNet-121", ((64, 112, 112), (256, 56, 56), (512, 28, 28), (1024, 7, 7)), 1000),
        Maps("ResNet-20, CIFAR-10", ((16, 32, 32), (32, 16, 16), (64, 8, 8)), 10),
        Maps(
            "Stable Diffusion 1.5",
            ((320, 64, 64), (640, 32, 32), (1280, 16, 16), (1280, 8, 8)),
            groups=32,
        ),
        Maps("SDXL", ((320, 128, 128), (640, 64, 64), (1280, 32, 32)), groups=32),
        Maps("Stable Diffusion VAE", ((128, 512, 512), (256, 256, 256), (512, 64, 64)), groups=32),
    ),
    segmentation=(
        Maps("DeepLabv3, Pascal VOC", ((21, 513, 513),)),
        Maps("FCN, Cityscapes", ((19, 512, 1024),)),
        Maps("SegFormer-B0, ADE20K", ((150, 128, 128),)),
        Maps("U-Net, cells", ((2, 388, 388),)),
    ),
    perceptrons=(
        Perceptron("DLRM, bottom", (13, 512, 256, 128), (2048, 8192, 65536)),
        Perceptron("DLRM, top", (479, 1024, 1024, 512, 256, 1), (2048, 8192, 65536)),
        Perceptron("LeNet-300-100", (784, 300, 100, 10), (128, 1024, 8192)),
        Perceptron("MLP-Mixer B/16, tokens", (196, 384, 196), (768, 12288, 49152)),
        Perceptron("MLP-Mixer B/16, channels", (768, 3072, 768), (196, 3136, 12544)),
    ),
    images=(
        ("ResNet-50", 224),
        ("CLIP ViT-L/14", 224),
        ("ViT-L/16", 384),
        ("EfficientNet-B7", 600),
        ("Stable Diffusion 1.5", 512),
        ("SAM ViT-H", 1024),
    ),
    patches=(
        ("ViT-B/16", 14, 16, 3),
        ("ViT-H/14", 16, 14, 3),
        ("DiT-XL/2", 16, 2, 4),
        ("Swin-T, stage 1", 8, 7, 96),
        ("Swin-B, stage 2", 4, 7, 256),
    ),
    sequences=(
        ("MLP-Mixer B/16", 196, 768),
        ("Whisper, spectrogram", 80, 3000),
        ("wav2vec 2.0 base", 499, 512),
        ("Whisper large, encoder", 1500, 1280),
    ),
)

FURTHER = Models(
    decoders=(
        _llama("LLaMA 30B", 6656, 52, 52, 128, 17920, 2048, 32000),
        _llama("Code Llama 34B", 8192, 64, 8, 128, 22016, 16384, 32000),
        _llama("Llama 3.2 3B", 3072, 24, 8, 128, 8192, 131072, 128256),
        _llama("Yi 6B", 4096, 32, 4, 128, 11008, 4096, 64000),
        _llama("Yi 34B", 7168, 56, 8, 128, 20480, 4096, 64000),
        _llama("OLMo 2 7B", 4096, 32, 32, 128, 11008, 4096, 100352),
        _llama("InternLM2 7B", 4096, 32, 8, 128, 14336, 32768, 92544),
        _llama("Mistral NeMo 12B", 5120, 32, 8, 128, 14336, 131072, 131072),
        _llama("Mistral Small 3 24B", 5120, 32, 8, 128, 32768, 32768, 131072),
        _llama("Mixtral 8x22B", 6144, 48, 8, 128, 16384, 65536, 32000, experts=8),
        _llama("Qwen1.5-MoE A2.7B", 2048, 16, 16, 128, 1408, 8192, 151936, experts=60),
        _llama("Qwen2.5 3B", 2048, 16, 2, 128, 11008, 32768, 151936),
        _llama("Qwen2.5 14B", 5120, 40, 8, 128, 13824, 32768, 152064),
        _llama("Qwen3 1.7B", 2048, 16, 8, 128, 6144, 32768, 151936),
        _llama("Qwen3 4B", 2560, 32, 8, 128, 9728, 32768, 151936),
        _llama("Gemma 2B", 2048, 8, 1, 256, 16384, 8192, 256000, "gelu"),
        _llama("Gemma 7B", 3072, 16, 16, 256, 24576, 8192, 256000, "gelu"),
        _llama("Gemma 2 27B", 4608, 32, 16, 128, 36864, 8192, 256000, "gelu"),
        _llama("Gemma 3 270M", 640, 4, 1, 256, 2048, 32768, 262144, "gelu"),
        _llama("Gemma 3 4B", 2560, 8, 4, 256, 10240, 131072, 262208, "gelu"),
        _llama("Gemma 3 27B", 5376, 32, 16, 128, 21504, 131072, 262208, "gelu"),
        _llama("Phi-3 medium", 5120, 40, 10, 128, 17920, 4096, 32064),
        _llama("Phi-4 mini", 3072, 24, 8, 128, 8192, 131072, 200064),
        _llama("SmolLM2 360M", 960, 15, 5, 64, 2560, 8192, 49152),
        _llama("SmolLM2 1.7B", 2048, 32, 32, 64, 8192, 8192, 49152),
        _llama("Granite 3.0 2B", 2048, 32, 8, 64, 8192, 4096, 49155),
        _llama("Granite 3.0 1B-A400M", 1024, 16, 8, 64, 512, 4096, 49155, experts=32),
        _gpt("Falcon 7B", 4544, 71, 64, 18176, 2048, 65024, "gelu_exact", bias=False, key_heads=1),
        _gpt("StarCoder2 3B", 3072, 24, 128, 12288, 16384, 49152, key_heads=2),
        _gpt("GPT-Neo 125M", 768, 12, 64, 3072, 2048, 50257),
        _gpt("GPT-Neo 1.3B", 2048, 16, 128, 8192, 2048, 50257),
        _gpt("GPT-NeoX 20B", 6144, 64, 96, 24576, 2048, 50432),
        _gpt("Pythia 70M", 512, 8, 64, 2048, 2048, 50304, "gelu_exact"),
        _gpt("Pythia 2.8B", 2560, 32, 80, 10240, 2048, 50304, "gelu_exact"),
        _gpt("OPT 125M", 768, 12, 64, 3072, 2048, 50272, "relu"),
        _gpt("OPT 13B", 5120, 40, 128, 20480, 2048, 50272, "relu"),
        _gpt("BLOOM 1.7B", 2048, 16, 128, 8192, 2048, 250880),
        _gpt("BLOOM 7.1B", 4096, 32, 128, 16384, 2048, 250880),
        _gpt("Phi-1.5", 2048, 32, 64, 8192, 2048, 51200),
        _gpt("XGLM 564M", 1024, 16, 64, 4096, 2048, 256008, "gelu_exact"),
        _gpt("MusicGen small", 1024, 16, 64, 4096, 1500, 2048, "gelu_exact"),
        _gpt("Whisper base, decoder", 512, 8, 64, 2048, 448, 51865, "gelu_exact"),
        _gpt("Whisper medium, decoder", 1024, 16, 64, 4096, 448, 51865, "gelu_exact"),
        _gpt("OpenCLIP ViT-H/14, text", 1024, 16, 64, 4096, 77, 0, "gelu_exact", lengths=(77,)),
        _gpt("OpenCLIP ViT-bigG/14, text", 1280, 20, 64, 5120, 77, 0, "gelu_exact", lengths=(77,)),
        _gpt("SASRec, MovieLens-1M", 50, 1, 50, 50, 200, 3416, "relu"),
    ),
    encoders=(
        # The head of ALBERT multiplies vectors of 128 elements, not hidden states.
        _bert("ALBERT base", 768, 12, 64, 3072, 512, 0, "gelu"),
        _bert("ALBERT xxlarge", 4096, 64, 64, 16384, 512, 0),
        _bert("TinyBERT 4L", 312, 12, 26, 1200, 512, 30522),
        _bert("BERT mini", 256, 4, 64, 1024, 512, 30522),
        _bert("BERT small", 512, 8, 64, 2048, 512, 30522),
        _bert("BERT base, multilingual", 768, 12, 64, 3072, 512, 119547),
        _bert("MiniLM L12, multilingual", 384, 12, 32, 1536, 512, 250037),
        _bert("DeBERTa v3 xsmall", 384, 6, 64, 1536, 512, 128100),
        _bert("DeBERTa v3 base", 768, 12, 64, 3072, 512, 128100),
        _bert("DeBERTa v3 large", 1024, 16, 64, 4096, 512, 128100),
        _bert("DeBERTa v2 XXL", 1536, 24, 64, 6144, 512, 128100),
        _bert("XLM-R large", 1024, 16, 64, 4096, 512, 250002),
        _bert("XLM-R XL", 2560, 32, 80, 10240, 512, 250880),
        _bert("BGE-M3", 1024, 16, 64, 4096, 8192, 0),
        _bert("ModernBERT large", 1024, 16, 64, 2624, 8192, 50368, gated=True, bias=False),
        _bert("nomic-bert-2048", 768, 12, 64, 3072, 2048, 30528, "silu", gated=True, bias=False),
        _bert("T5 small", 512, 8, 64, 2048, 512, 32128, "relu", bias=False),
        _bert("T5 3B", 1024, 32, 128, 16384, 512, 32128, "relu", bias=False),
        _bert("Flan-T5 XXL", 4096, 64, 64, 10240, 512, 32128, "gelu", gated=True, bias=False),
        _bert("mT5 small", 512, 6, 64, 1024, 1024, 250112, "gelu", gated=True, bias=False),
        _bert("mT5 large", 1024, 16, 64, 2816, 1024, 250112, "gelu", gated=True, bias=False),
        _bert("ByT5 small", 1472, 6, 64, 3584, 1024, 384, "gelu", gated=True, bias=False),
        _bert("BART base", 768, 12, 64, 3072, 1024, 50265),
        _bert("mBART large", 1024, 16, 64, 4096, 1024, 250027),
        _bert("Pegasus large", 1024, 16, 64, 4096, 1024, 96103, "relu"),
        _bert("NLLB-200 600M", 1024, 16, 64, 4096, 1024, 256206, "relu"),
        _bert("Marian, English to German", 512, 8, 64, 2048, 512, 58101, "silu"),
        _bert("ESM-2 8M", 320, 20, 16, 1280, 1024, 33),
        _bert("ESM-2 35M", 480, 20, 24, 1920, 1024, 33),
        _bert("ESM-2 150M", 640, 20, 32, 2560, 1024, 33),
        _bert("ESM-2 3B", 2560, 40, 64, 10240, 1024, 33),
        _bert("HuBERT large", 1024, 16, 64, 4096, 999, 32, lengths=(499, 749, 999)),
        _bert("HuBERT X-Large", 1280, 16, 80, 5120, 999, 32, lengths=(499, 749, 999)),
        _bert("XLS-R 2B", 1920, 16, 120, 7680, 999, 0, lengths=(499, 749, 999)),
        _bert("LayoutLMv3 base", 768, 12, 64, 3072, 709, 0, lengths=(709,)),
    ),
    patch_encoders=(
        _vit("ViT-g/14", 1408, 16, 88, 6144, (257,)),
        _vit("MAE ViT-L/16, encoder", 1024, 16, 64, 4096, (50,)),
        _vit("MAE ViT-L/16, decoder", 512, 16, 32, 2048, (197,)),
        _vit("DeiT-B, distilled", 768, 12, 64, 3072, (198, 578), 1000),
        _vit("OpenCLIP ViT-H/14", 1280, 16, 80, 5120, (257,)),
        _vit("OpenCLIP ViT-bigG/14", 1664, 16, 104, 8192, (257,)),
        _vit("DINOv2 ViT-B/14", 768, 12, 64, 3072, (257, 1370)),
        _vit("DINOv2 ViT-g/14", 1536, 24, 64, 4096, (257, 1370), 0, "silu", gated=True),
        _vit("SigLIP B/16", 768, 12, 64, 3072, (196, 576, 1024), 0, "gelu"),
        _vit("SigLIP So400m/14", 1152, 16, 72, 4304, (256, 729), 0, "gelu"),
        _vit("SAM ViT-B", 768, 12, 64, 3072, (196, 4096)),
        _vit("Whisper base, encoder", 512, 8, 64, 2048, (1500,)),
        _vit("Whisper medium, encoder", 1024, 16, 64, 4096, (1500,)),
        _vit("Audio Spectrogram Transformer", 768, 12, 64, 3072, (1214,), 527),
        _vit("VideoMAE B", 768, 12, 64, 3072, (160, 1568), 400),
        _vit("ViViT B/16x2", 768, 12, 64, 3072, (3137,), 400),
        _vit("DiT-S/2", 384, 6, 64, 1536, (256, 1024), 0, "gelu"),
        _vit("PixArt-alpha", 1152, 16, 72, 4608, (1024, 4096), 0, "gelu"),
        _vit("Stable Diffusion 3 medium", 1536, 24, 64, 6144, (1178, 4250), 0, "gelu"),
        _vit("FLUX.1", 3072, 24, 128, 12288, (4608,), 0, "gelu"),
        _vit("PatchTST", 128, 16, 8, 256, (42, 64)),
    ),
    cross_attention=(
        CrossAttention("Stable Diffusion 2.1, 96 x 96", 5, 64, ((9216, 77), (9216, 9216))),
        CrossAttention("Stable Diffusion 2.1, 48 x 48", 10, 64, ((2304, 77), (2304, 2304))),
        CrossAttention("Stable Diffusion 2.1, 24 x 24", 20, 64, ((576, 77), (576, 576))),
        CrossAttention("PixArt-alpha", 16, 72, ((1024, 120), (4096, 120))),
        CrossAttention("Whisper medium, decoder", 16, 64, ((448, 1500), (1, 1500))),
        CrossAttention("T5 3B, decoder", 32, 128, ((114, 512), (512, 512))),
        CrossAttention("BLIP-2, Q-Former", 12, 64, ((32, 257), (32, 32))),
        CrossAttention("Mask2Former R50, decoder", 8, 32, ((100, 256), (100, 1024), (100, 4096))),
        CrossAttention("Perceiver IO, language", 8, 32, ((256, 2048), (256, 256))),
        CrossAttention("SAM, mask decoder", 8, 16, ((7, 4096), (4096, 7))),
        CrossAttention("Enformer", 8, 64, ((1536, 1536),)),
    ),
    windows=(
        Windows("Swin V2-T, stage 1", 64, 3, 32, 64),
        Windows("Swin V2-B, window 16, stage 1", 16, 4, 32, 256),
        Windows("Swin-B, 384, stage 1", 64, 4, 32, 144),
        Windows("Swin-L, 384, stage 3", 4, 24, 32, 144),
        Windows("MaxViT-T, stage 1", 64, 2, 32, 49),
        Windows("SAM ViT-B, windows", 25, 12, 64, 196),
        Windows("AlphaFold 2, MSA rows, fine-tuned", 512, 8, 32, 384),
        Windows("AlphaFold 2, triangle, fine-tuned", 384, 4, 32, 384),
    ),
    maps=(
        Maps("Wide ResNet-50-2", _RESNET, 1000, inner=1 / 2),
        Maps("WRN-28-10, CIFAR-100", ((160, 32, 32), (320, 16, 16), (640, 8, 8)), 100),
        Maps(
            "RegNetY-16GF",
            ((224, 56, 56), (448, 28, 28), (1232, 14, 14), (3024, 7, 7)),
            1000,
            inner=1,
        ),
        Maps(
            "DenseNet-201",
            ((64, 112, 112), (256, 56, 56), (512, 28, 28), (1792, 14, 14), (1920, 7, 7)),
            1000,
        ),
        Maps(
            "Inception v3",
            ((32, 149, 149), (192, 71, 71), (288, 35, 35), (768, 17, 17), (2048, 8, 8)),
            1000,
        ),
        Maps(
            "MobileNetV3 large",
            ((16, 112, 112), (72, 56, 56), (120, 28, 28), (480, 14, 14), (960, 7, 7)),
            1000,
        ),
        Maps(
            "EfficientNet-B4", ((48, 190, 190), (192, 95, 95), (336, 48, 48), (1792, 12, 12)), 1000
        ),
        Maps(
            "EfficientNetV2-S",
            ((24, 192, 192), (192, 96, 96), (256, 48, 48), (960, 24, 24), (1280, 12, 12)),
            1000,
        ),
        Maps(
            "Darknet-53, 416",
            ((64, 208, 208), (128, 104, 104), (256, 52, 52), (512, 26, 26), (1024, 13, 13)),
            inner=1 / 2,
        ),
        Maps("BiT-M R50x1", _RESNET, 21843, groups=32, inner=1 / 4),
        Maps("DDPM, CIFAR-10", ((128, 32, 32), (256, 16, 16), (256, 8, 8), (256, 4, 4)), groups=32),
        Maps(
            "ADM, ImageNet 256",
            ((256, 128, 128), (512, 64, 64), (512, 32, 32), (1024, 16, 16), (1024, 8, 8)),
            groups=32,
        ),
        Maps(
            "Stable Diffusion 2.1",
            ((320, 96, 96), (640, 48, 48), (1280, 24, 24), (1280, 12, 12)),
            groups=32,
        ),
        Maps("SDXL VAE", ((128, 1024, 1024), (256, 512, 512), (512, 128, 128)), groups=32),
    ),
    segmentation=(
        Maps("DeepLabv3+, Cityscapes", ((19, 769, 769),)),
        Maps("PSPNet, ADE20K", ((150, 473, 473),)),
        Maps("SegFormer-B5, Cityscapes", ((19, 256, 256),)),
        Maps("SegFormer-B5, COCO-Stuff", ((171, 128, 128),)),
    ),
    perceptrons=(
        Perceptron("DCN v2, cross layers", (3456, 512, 3456), (2048, 8192, 65536)),
        Perceptron("DCN v2, top", (3456, 1024, 1024, 512, 256, 1), (2048, 8192, 65536)),
        Perceptron("VGG-16, head", (25088, 4096, 4096, 1000), (32, 256, 1024)),
        Perceptron("NeRF", (60, 256, 256), (65536, 262144)),
        Perceptron("PointNet", (3, 64, 64, 64, 128, 1024), (32768,)),
        Perceptron("MLP-Mixer L/16, tokens", (196, 512, 196), (1024, 16384, 65536)),
        Perceptron("MLP-Mixer L/16, channels", (1024, 4096, 1024), (196, 3136, 12544)),
    ),
    images=(
        ("Inception v3", 299),
        ("EfficientNet-B4", 380),
        ("DINOv2 ViT-g/14", 518),
        ("Darknet-53", 416),
        ("Gemma 3, vision", 896),
        ("WRN-28-10, CIFAR-100", 32),
    ),
    patches=(
        ("DINOv2 ViT-B/14", 37, 14, 3),
        ("SigLIP So400m/14", 27, 14, 3),
        ("FLUX.1", 64, 2, 16),
        ("Swin-B, 384, stage 1", 8, 12, 128),
        ("SAM ViT-B, windows", 5, 14, 768),
    ),
    sequences=(
        ("MLP-Mixer L/16", 196, 1024),
        ("Whisper large-v3, spectrogram", 128, 3000),
        ("Audio Spectrogram Transformer, spectrogram", 1024, 128),
        ("HuBERT large", 749, 1024),
        ("Enformer, head", 896, 3072),
    ),
)
"""The models that were added for the second draw."""

DLRM_FEATURES, DLRM_WIDTH = 27, 128
"""The vectors that DLRM multiplies pairwise: 26 embeddings and the output of the bottom layers."""
