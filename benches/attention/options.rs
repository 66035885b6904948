//! What the command line asks for.

use sekv::kernels::Level;

use crate::CHUNK;

pub struct Options {
    pub quick: bool,
    /// Tokens.
    pub profile: Option<usize>,
    pub n_threads: usize,
    pub n_rounds: usize,
    pub decode: Vec<usize>,
    pub prefill: Vec<usize>,
}

impl Options {
    pub fn from_arguments() -> Self {
        let arguments: Vec<String> = std::env::args().skip(1).collect();
        let has = |name: &str| arguments.iter().any(|a| a == name);
        let number = |name: &str, default: usize| {
            let at = arguments.iter().position(|a| a == name);
            at.map_or(default, |i| {
                arguments.get(i + 1).and_then(|n| n.parse().ok()).unwrap_or_else(|| {
                    eprintln!("{name} wants a number");
                    std::process::exit(2)
                })
            })
        };
        if let Some(i) = arguments.iter().position(|a| a == "--level") {
            use_level(arguments.get(i + 1).map_or("", String::as_str));
        }
        let quick = has("--quick");
        let profile = has("--profile").then(|| number("--profile", 0).max(CHUNK));
        if let Some(n_tokens) = profile {
            let n_threads = number("--threads", 2).max(1);
            let (decode, prefill) = (vec![n_tokens], Vec::new());
            return Self { quick, profile, n_threads, n_rounds: 0, decode, prefill };
        }
        Self {
            quick,
            profile,
            n_threads: number("--threads", 2).max(1),
            n_rounds: number("--rounds", if quick { 5 } else { 9 }).max(1),
            decode: if quick { vec![8 << 10] } else { vec![8 << 10, 32 << 10, 128 << 10] },
            prefill: if quick { vec![4 << 10] } else { vec![4 << 10, 8 << 10] },
        }
    }
}

/// Keeps the library, the dense rival and the floor to the instructions of a lesser machine.
fn use_level(name: &str) {
    let levels = Level::available();
    match levels.iter().find(|level| level.name() == name) {
        Some(level) => assert!(level.use_for_all(), "a kernel ran before --level was read"),
        None => {
            let names: Vec<_> = levels.iter().map(|level| level.name()).collect();
            eprintln!("--level wants one of this machine's: {}", names.join(", "));
            std::process::exit(2)
        }
    }
}
