//! From 8K to a million tokens: time a token, what the process holds in memory, whether the answers
//! are still right, and how long a saved state takes to come back. Two layers of Llama-3-8B's
//! geometry, the slow tier in basis files under `target/growth`. Prints tables and writes
//! `target/growth.json`.
//!
//!     cargo bench --bench growth                     a million tokens: 25 GB of disk, minutes
//!     cargo bench --bench growth -- --tokens 65536
//!     cargo bench --bench growth -- --memory         the slow tier in anonymous memory

#[path = "../attention/generator.rs"]
mod generator;
mod reference;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use half::f16;
use sekv::cache::{BatchToken, Context};
use sekv::model::{Model, ModelParams, RopeKind};
use sekv::params::{DenseLayers, Params};
use sekv::tensor::{Dtype, View};
use serde_json::json;

use generator::{DIM, Generator, Kind, N_HEADS, N_KV_HEADS};
use reference::Reference;

const SEED: u64 = 20_251_130;
const LAYERS: usize = 2;
const CHUNK: usize = 2048;
const ROW: usize = N_KV_HEADS * DIM;
const SIZES: [usize; 8] =
    [8 << 10, 16 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20];
const N_QUERIES: usize = 15;
/// Queries that are held against dense attention.
const N_CHECKED: usize = 3;
const N_ROUNDS: usize = 3;
/// What the process may hold besides what the library counts: the program, its threads, the rows
/// of a chunk and of the reference.
const BESIDES: u64 = 256 << 20;

struct Options {
    n_tokens: usize,
    n_threads: usize,
    in_memory: bool,
}

impl Options {
    fn from_arguments() -> Self {
        let arguments: Vec<String> = std::env::args().skip(1).collect();
        let number = |name: &str, default: usize| {
            let at = arguments.iter().position(|a| a == name);
            at.map_or(default, |i| {
                arguments.get(i + 1).and_then(|n| n.parse().ok()).unwrap_or_else(|| {
                    eprintln!("{name} wants a number");
                    std::process::exit(2)
                })
            })
        };
        Self {
            n_tokens: number("--tokens", 1 << 20).max(SIZES[0]),
            n_threads: number("--threads", 2).max(1),
            in_memory: arguments.iter().any(|a| a == "--memory"),
        }
    }
}

fn model() -> Arc<Model> {
    let params = ModelParams {
        n_layer: LAYERS,
        n_head: N_HEADS,
        n_head_kv: N_KV_HEADS,
        head_dim_k: DIM,
        head_dim_v: DIM,
        rope: RopeKind::Neox,
        ..ModelParams::default()
    };
    Arc::new(Model::from_params(&params).expect("the geometry is valid"))
}

fn view<T>(data: &mut [T], dtype: Dtype, n_heads: usize) -> View {
    let n_tokens = data.len() / (n_heads * DIM);
    let size = size_of::<T>();
    // SAFETY: the rows are within `data`, which the callers keep alive over the call.
    unsafe {
        View::new(
            data.as_mut_ptr().cast(),
            dtype,
            [DIM, n_heads, n_tokens],
            [DIM * size, n_heads * DIM * size],
        )
    }
}

fn begin(context: &mut Context, first: usize, n: usize) {
    let batch: Vec<BatchToken> = (first..first + n)
        .map(|position| BatchToken { position: position as i32, sequences: &[0] })
        .collect();
    context.begin(&batch).expect("begin");
}

/// Layers whose keys and values are made anew whenever they are wanted.
struct Layers {
    generators: Vec<Generator>,
    n_threads: usize,
}

impl Layers {
    fn rows(&self, layer: usize, first: usize, n: usize) -> (Vec<f16>, Vec<f16>) {
        let (mut keys, mut values) = (vec![f16::ZERO; n * ROW], vec![f16::ZERO; n * ROW]);
        self.generators[layer].rows(first, &mut keys, &mut values, self.n_threads);
        (keys, values)
    }

    fn ingest(&self, context: &mut Context, first: usize, n: usize) {
        begin(context, first, n);
        for layer in 0..LAYERS {
            let (mut keys, mut values) = self.rows(layer, first, n);
            let k = view(&mut keys, Dtype::F16, N_KV_HEADS);
            let v = view(&mut values, Dtype::F16, N_KV_HEADS);
            context.ingest(layer, &k, &v).expect("ingest");
        }
    }

    fn fill(&self, context: &mut Context, first: usize, end: usize) {
        for first in (first..end).step_by(CHUNK) {
            let n = CHUNK.min(end - first);
            self.ingest(context, first, n);
            // The layout is chosen from the first queries; no others are kept for long.
            let observed = if first < 2 * CHUNK { LAYERS } else { 0 };
            for layer in 0..observed {
                let queries = |t| self.generators[layer].query(first + t, 0);
                let mut q: Vec<f32> = (0..n).flat_map(queries).collect();
                context.observe(layer, &view(&mut q, Dtype::F32, N_HEADS)).expect("observe");
            }
            context.commit(None).expect("commit");
        }
    }

    /// The outputs of one query behind `n_tokens`, of every layer, and the seconds of its attends.
    fn attend(&self, context: &mut Context, n_tokens: usize, number: usize) -> (Vec<f32>, f64) {
        self.ingest(context, n_tokens, 1);
        let (mut all, mut seconds) = (Vec::new(), 0.0);
        for layer in 0..LAYERS {
            let mut q = self.generators[layer].query(n_tokens, number);
            let mut out = vec![0.0; N_HEADS * DIM];
            let (q, o) = (view(&mut q, Dtype::F32, N_HEADS), view(&mut out, Dtype::F32, N_HEADS));
            let started = Instant::now();
            context.attend(layer, &q, None, &o).expect("attend");
            seconds += started.elapsed().as_secs_f64();
            all.extend(out);
        }
        context.abort().expect("abort");
        (all, seconds)
    }
}

/// Bytes that the process holds: all, of which anonymous.
fn resident() -> (u64, u64) {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let kilobytes = |name: &str| {
        let line = status.lines().find(|line| line.starts_with(name));
        line.and_then(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok()).unwrap_or(0)
    };
    (kilobytes("VmRSS:") << 10, kilobytes("RssAnon:") << 10)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn seconds(work: impl FnOnce()) -> f64 {
    let started = Instant::now();
    work();
    started.elapsed().as_secs_f64()
}

fn mebibytes(bytes: u64) -> u64 {
    bytes >> 20
}

fn new_context(options: &Options, folder: &Path, params: Params) -> Context {
    let basis_folder = (!options.in_memory).then(|| folder.to_owned());
    let params = Params {
        n_threads: options.n_threads,
        n_seq_max: 1,
        dense: DenseLayers::None,
        basis_folder,
        ..params
    };
    Context::new(model(), params).expect("the parameters are valid")
}

/// Time a token and memory at each size.
fn grow(options: &Options, layers: &Layers, context: &mut Context) -> Vec<serde_json::Value> {
    println!(
        "| tokens | attend ms, {LAYERS} layers | times the size before | fetched | in the middle \
         | resident MiB | of them anonymous | fast tier MiB | slow tier MiB | of it in files |"
    );
    println!("|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|");
    let (mut rows, mut held, mut before) = (Vec::new(), 0, None);
    let sizes = SIZES.into_iter().filter(|&n| n < options.n_tokens).chain([options.n_tokens]);
    for n_tokens in sizes {
        layers.fill(context, held, n_tokens);
        held = n_tokens;
        let first = context.statistics().counters;
        let mut times = Vec::new();
        for number in 0..2 * N_QUERIES {
            let (_, seconds) = layers.attend(context, n_tokens, number % N_QUERIES);
            // The first time, a query brings its rows from the disk.
            if number >= N_QUERIES {
                times.push(seconds);
            }
        }
        let after = context.statistics();
        let steps = (after.counters.fetched.count() - first.fetched.count()) as f64;
        let a_step = |after: f64, before: f64| (after - before) / steps;
        let total = |h: &sekv::cache::Histogram| h.mean() * h.count() as f64;
        let fetched = a_step(total(&after.counters.fetched), total(&first.fetched));
        let middle = a_step(total(&after.counters.middle), total(&first.middle));
        let (rss, anonymous) = resident();
        let time = median(times);
        println!(
            "| {n_tokens} | {:.2} | {} | {fetched:.0} | {middle:.0} | {} | {} | {} | {} | {} |",
            time * 1e3,
            before.map_or("-".to_string(), |before: f64| format!("{:.2}", time / before)),
            mebibytes(rss),
            mebibytes(anonymous),
            mebibytes(after.memory.fast),
            mebibytes(after.memory.slow),
            mebibytes(after.memory.slow_file),
        );
        before = Some(time);
        rows.push(json!({
            "n_ctx": n_tokens, "median_s": time, "fetched": fetched, "middle": middle,
            "resident_bytes": rss, "anonymous_bytes": anonymous,
            "fast_bytes": after.memory.fast, "slow_bytes": after.memory.slow,
            "slow_file_bytes": after.memory.slow_file,
        }));
    }
    rows
}

/// Saves, copies the file as `cp` does, and loads it, in turns.
fn restore(options: &Options, folder: &Path, context: Context) -> (Context, serde_json::Value) {
    let (path, copy) = (folder.join("state"), folder.join("copy"));
    let save = seconds(|| context.save_file(0, &path).expect("save"));
    let bytes = std::fs::metadata(&path).expect("the state is there").len();
    drop(context);
    // Every sealed token is read: what is left of a difference is the codec's.
    let mut loaded: Option<Context> = None;
    let (mut copies, mut loads, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..N_ROUNDS {
        // Its segments would be found and shared.
        drop(loaded.take());
        let _ = std::fs::remove_file(&copy);
        let cp = seconds(|| {
            let status = std::process::Command::new("cp").arg(&path).arg(&copy).status();
            assert!(status.is_ok_and(|status| status.success()), "cp failed");
        });
        let params = Params { share_threshold: 0.0, ..Params::default() };
        let mut context = new_context(options, folder, params);
        let load = seconds(|| context.load_file(0, &path).expect("load"));
        loaded = Some(context);
        copies.push(cp);
        loads.push(load);
        ratios.push(load / cp);
    }
    let _ = std::fs::remove_file(&path);
    let _ = std::fs::remove_file(&copy);
    let (cp, load, ratio) = (median(copies), median(loads), median(ratios));
    println!(
        "\nstate: {} MiB saved in {save:.1} s; cp of the file {cp:.1} s, load {load:.1} s: {ratio:.2} \
         times cp (medians of {N_ROUNDS} turns)",
        mebibytes(bytes)
    );
    let json = json!({
        "state_bytes": bytes, "save_s": save, "cp_s": cp, "load_s": load, "load_over_cp": ratio,
    });
    (loaded.expect("loaded once"), json)
}

/// Largest difference to dense attention, over the largest magnitude of the right one, mean over
/// queries and layers, and the worst.
fn errors(found: &[Vec<f32>], right: &[Vec<f64>]) -> (f64, f64) {
    let mut all = Vec::new();
    for (found, right) in found.iter().zip(right) {
        for (found, right) in found.chunks(N_HEADS * DIM).zip(right.chunks(N_HEADS * DIM)) {
            let largest = right.iter().fold(0.0f64, |m, x| m.max(x.abs()));
            let pairs = found.iter().zip(right);
            let worst = pairs.fold(0.0f64, |m, (f, r)| m.max((f64::from(*f) - r).abs()));
            all.push(worst / largest);
        }
    }
    (all.iter().sum::<f64>() / all.len() as f64, all.iter().fold(0.0, |m: f64, x| m.max(*x)))
}

fn main() {
    // `cargo test --benches` only wants to know that it builds.
    if std::env::args().any(|a| a == "--test") {
        return;
    }
    let options = Options::from_arguments();
    let folder: PathBuf = concat!(env!("CARGO_MANIFEST_DIR"), "/target/growth").into();
    std::fs::create_dir_all(&folder).expect("target/growth can be made");
    let generators = (0..LAYERS as u64)
        .map(|layer| Generator::new(Kind::Realistic, SEED + layer, options.n_tokens + 1))
        .collect();
    let layers = Layers { generators, n_threads: options.n_threads };
    println!("{} threads, seed {SEED}, {LAYERS} layers\n", options.n_threads);

    let mut context = new_context(&options, &folder, Params::default());
    let rows = grow(&options, &layers, &mut context);
    let memory = context.statistics().memory;
    let bound = memory.fast + memory.scratch + (memory.slow - memory.slow_file) + BESIDES;
    let (_, anonymous) = resident();
    println!(
        "\nmemory: {} MiB anonymous, bound {} MiB: fast tier {}, what of the slow tier is not in \
         files {}, scratch {}, {} for the program; a full f16 cache takes {}. Pages of basis files \
         come on top while a fetch needs them, and are the system's to take back.",
        mebibytes(anonymous),
        mebibytes(bound),
        mebibytes(memory.fast),
        mebibytes(memory.slow - memory.slow_file),
        mebibytes(memory.scratch),
        mebibytes(BESIDES),
        mebibytes(memory.full_f16)
    );
    assert!(anonymous <= bound, "the process holds more than the bound");

    let attend = |context: &mut Context| -> Vec<Vec<f32>> {
        (0..N_CHECKED).map(|i| layers.attend(context, options.n_tokens, i).0).collect()
    };
    let found = attend(&mut context);
    let (mut context, restored) = restore(&options, &folder, context);
    let found_all = attend(&mut context);
    drop(context);
    let mut right = vec![Vec::new(); N_CHECKED];
    for layer in 0..LAYERS {
        let generator = &layers.generators[layer];
        let queries = (0..N_CHECKED).map(|i| generator.query(options.n_tokens, i)).collect();
        let mut reference = Reference::new(queries, options.n_threads);
        for first in (0..=options.n_tokens).step_by(CHUNK) {
            let n = CHUNK.min(options.n_tokens + 1 - first);
            let (keys, values) = layers.rows(layer, first, n);
            reference.add(&keys, &values);
        }
        for (all, out) in right.iter_mut().zip(reference.outputs()) {
            all.extend(out);
        }
    }
    let ((mean, worst), (mean_all, worst_all)) =
        (errors(&found, &right), errors(&found_all, &right));
    println!(
        "\nagainst dense attention in f64, {N_CHECKED} queries, of the largest value: default \
         epsilon mean {mean:.4}, worst {worst:.4}; every token read (the loaded state) mean \
         {mean_all:.5}, worst {worst_all:.5}"
    );
    assert!(worst_all < 0.03, "with every token read the answer is the codec's");
    let json = json!({
        "layers": LAYERS, "rows": rows, "state": restored,
        "memory": {
            "anonymous_bytes": anonymous, "bound_bytes": bound,
            "full_f16_bytes": memory.full_f16,
        },
        "errors": { "mean": mean, "worst": worst, "all_mean": mean_all, "all_worst": worst_all },
    });
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/target/growth.json");
    std::fs::write(path, format!("{json:#}\n")).expect("target/growth.json can be written");
}
