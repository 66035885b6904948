//! What is known of each architecture beside its metadata, as llama.cpp has it.
//!
//! Two things about a model's attention stand in no GGUF key: which dimensions RoPE rotates
//! together, and what a score is multiplied by after the query has come in (some architectures
//! scale the query first, and then it is 1). An architecture that is not in these tables is
//! refused: a guess would give wrong answers in silence.

use super::geometry::RopeKind;
use super::preflight::quoted;
use crate::error::{Result, fail};

/// The factor of a score where no key says it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ScoreScale {
    /// 1 / sqrt(d_k).
    InverseRoot,
    /// 1: the query comes in scaled.
    One,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Architecture {
    pub name: &'static str,
    pub rope: RopeKind,
    pub scale: ScoreScale,
}

const NORM: &[&str] = &[
    "llama",
    "arcee",
    "arctic",
    "baichuan",
    "chameleon",
    "chatglm",
    "command-r",
    "deci",
    "deepseek",
    "ernie4_5",
    "ernie4_5-moe",
    "glm4",
    "granite",
    "granitemoe",
    "internlm2",
    "maincoder",
    "minicpm",
    "mistral3",
    "olmo",
    "xverse",
];

const NEOX: &[&str] = &[
    "apertus",
    "bailingmoe2",
    "bitnet",
    "codeshell",
    "dbrx",
    "dots1",
    "exaone",
    "falcon",
    "glm4moe",
    "gptneox",
    "grovemoe",
    "hunyuan-dense",
    "hunyuan-moe",
    "jais2",
    "minimax-m2",
    "nemotron",
    "olmo2",
    "olmoe",
    "openelm",
    "orion",
    "pangu-embedded",
    "plamo",
    "qwen",
    "qwen2",
    "qwen2moe",
    "qwen3",
    "qwen3moe",
    "seed_oss",
    "stablelm",
    "starcoder2",
];

/// Halves as in `NEOX`, and the query is scaled before attention.
const NEOX_SCALED_QUERY: &[&str] = &["gemma", "gemma3", "phi2", "phi3", "phimoe"];

/// Positions are learned and added to the embeddings.
const NO_ROPE: &[&str] = &["gpt2", "starcoder"];

/// Known, and not served, with the reason.
const REFUSED: &[(&str, &[&str])] = &[
    ("ALiBi position biases", &["bloom", "jais", "mpt", "refact"]),
    (
        "multi-head latent attention (MLA)",
        &[
            "deepseek2",
            "deepseek32",
            "dots3note",
            "glm-dsa",
            "hy_v4",
            "minicpm3",
            "mistral4",
            "plm",
        ],
    ),
    ("attention logit softcapping", &["gemma2", "grok"]),
    ("attention sinks", &["gpt-oss"]),
    (
        "sliding-window attention",
        &[
            "afmoe",
            "cohere2",
            "cohere2moe",
            "exaone-moe",
            "exaone4",
            "gemma3n",
            "gemma4",
            "granite_swa",
            "laguna",
            "llama4",
            "mellum",
            "mimo2",
            "muse-glimmer",
            "plamo3",
            "smallthinker",
            "step35",
        ],
    ),
    ("layers without RoPE between layers with it", &["smollm3"]),
    (
        "multi-section RoPE (mrope, imrope)",
        &["clef", "hunyuan_vl", "paddleocr", "qwen2vl", "qwen3tts", "qwen3vl", "qwen3vlmoe"],
    ),
    ("recurrent layers", &["arwkv7", "mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7"]),
    (
        "a mix of recurrent and attention layers",
        &[
            "bailingmoe3",
            "falcon-h1",
            "glm5-next",
            "granitehybrid",
            "jamba",
            "kimi-k3",
            "kimi-linear",
            "lfm2",
            "lfm2moe",
            "minimax-01",
            "nemotron_h",
            "nemotron_h_moe",
            "plamo2",
            "qwen35",
            "qwen35moe",
            "qwen3next",
            "qwen4exp",
        ],
    ),
    (
        "an encoder, which keeps no KV cache",
        &[
            "bert",
            "eurobert",
            "gemma-embedding",
            "jina-bert-v2",
            "jina-bert-v3",
            "llama-embed",
            "modern-bert",
            "neo-bert",
            "nomic-bert",
            "nomic-bert-moe",
            "t5encoder",
        ],
    ),
    ("an encoder beside the decoder", &["t5"]),
    ("attention that is not causal (a diffusion model)", &["dream", "llada", "llada-moe", "rnd1"]),
];

impl Architecture {
    /// The architecture of that name, or an error that says why it cannot be served.
    pub fn named(name: &str) -> Result<Self> {
        let find = |names: &[&'static str]| names.iter().copied().find(|&known| known == name);
        let tables = [
            (NORM, RopeKind::Norm, ScoreScale::InverseRoot),
            (NEOX, RopeKind::Neox, ScoreScale::InverseRoot),
            (NEOX_SCALED_QUERY, RopeKind::Neox, ScoreScale::One),
            (NO_ROPE, RopeKind::None, ScoreScale::InverseRoot),
        ];
        for (names, rope, scale) in tables {
            if let Some(name) = find(names) {
                return Ok(Self { name, rope, scale });
            }
        }
        for (reason, names) in REFUSED {
            if let Some(name) = find(names) {
                fail!(Unsupported, "architecture \"{name}\" is not supported: it has {reason}");
            }
        }
        fail!(Unsupported, "architecture {} is not known to this library", quoted(name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_architecture_stands_twice() {
        let tables = [NORM, NEOX, NEOX_SCALED_QUERY, NO_ROPE];
        let refused = REFUSED.iter().map(|(_, names)| *names);
        let mut names: Vec<_> = tables.into_iter().chain(refused).flatten().collect();
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
    }

    #[test]
    fn rope_kinds_are_those_of_llama_cpp() {
        for (name, rope) in [
            ("llama", RopeKind::Norm),
            ("internlm2", RopeKind::Norm),
            ("glm4", RopeKind::Norm),
            ("qwen2", RopeKind::Neox),
            ("qwen3", RopeKind::Neox),
            ("falcon", RopeKind::Neox),
            ("gptneox", RopeKind::Neox),
            ("stablelm", RopeKind::Neox),
            ("starcoder2", RopeKind::Neox),
            ("phi3", RopeKind::Neox),
            ("gemma", RopeKind::Neox),
            ("gpt2", RopeKind::None),
        ] {
            assert_eq!(Architecture::named(name).unwrap().rope, rope, "{name}");
        }
    }

    #[test]
    fn refusals_name_the_architecture_and_the_reason() {
        for (name, reason) in [
            ("bloom", "ALiBi"),
            ("deepseek2", "MLA"),
            ("gemma2", "softcapping"),
            ("gpt-oss", "sinks"),
            ("cohere2", "sliding-window"),
            ("qwen2vl", "mrope"),
            ("qwen3vl", "imrope"),
            ("mamba", "recurrent"),
            ("rwkv7", "recurrent"),
            ("jamba", "mix of recurrent"),
            ("bert", "encoder"),
            ("smollm3", "without RoPE"),
            ("dream", "not causal"),
            ("something\nnew", "not known"),
        ] {
            let error = Architecture::named(name).unwrap_err();
            assert_eq!(error.status, crate::error::Status::Unsupported);
            assert!(error.message.contains(reason), "{error}");
            assert!(!error.message.contains('\n'), "{error}");
            assert!(error.message.contains(name.lines().next().unwrap()), "{error}");
        }
    }
}
