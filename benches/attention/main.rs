//! Speed of one layer's attention at Llama-3-8B's geometry (32 query heads, 8 KV heads, d = 128),
//! against a dense f16 attention, against llama.cpp's own, and against what the machine's memory
//! and arithmetic allow. Prints a table and writes `target/bench.json`.
//!
//!     cargo bench                      everything, a few minutes
//!     cargo bench -- --quick           8K only, fewer rounds
//!     cargo bench -- --threads 4 --rounds 9
//!     cargo bench -- --level avx2      with the instructions of a lesser machine
//!     cargo bench -- --profile 32768   attends for ten seconds and nothing else, for perf
//!
//! The runner is our own: what counts here is how the rivals compare, on machines that are never
//! quiet, so they take turns within one run (`rounds.rs`). criterion and divan measure one
//! function after the other, and an hour's noise would land on one of them.

mod bounds;
mod dense;
mod floor;
mod generator;
mod llama;
mod memory;
mod options;
mod rounds;
mod row;

use std::cell::RefCell;
use std::sync::Arc;
use std::time::Instant;

use half::f16;
use half::slice::HalfFloatSliceExt;
use sekv::cache::{BatchToken, Context};
use sekv::kernels::{Level, SketchShape};
use sekv::model::{Model, ModelParams, RopeKind};
use sekv::params::{DenseLayers, Params};
use sekv::pool::Pool;
use sekv::tensor::{Dtype, View};
use serde_json::json;

use dense::{Dense, DenseScratch};
use floor::{Rates, Reading, Step};
use generator::{DIM, Generator, Kind, N_HEADS, N_KV_HEADS};
use llama::{CacheType, Llama, LlamaAttention, LlamaCache};
use options::Options;
use rounds::{Samples, Work, alternate, seconds};
use row::Row;

/// Of keys, values and queries.
const SEED: u64 = 20_251_130;
/// Tokens a pass brings while a context is filled.
const CHUNK: usize = 2048;
const PREFILL_CHUNK: usize = 512;
/// Queries that take turns.
const N_QUERIES: usize = 16;
const ROW: usize = N_KV_HEADS * DIM;
/// `compact`, the default at d = 128.
const SKETCH: SketchShape = SketchShape { n4: 16, n2: 32 };

/// All rivals' caches of the same tokens.
struct Rivals {
    generator: Generator,
    context: Context,
    dense: Dense,
    library: Option<Arc<Llama>>,
    llama: Vec<(CacheType, LlamaCache)>,
    n_threads: usize,
    /// Tokens written to the rivals' caches, and committed to the context.
    n_written: usize,
    n_committed: usize,
    pool: Pool,
    /// Seconds of each full chunk: commit (it seals), and a copy of as many bytes of f16.
    seal: Samples,
    copy: Samples,
}

impl Rivals {
    fn new(kind: Kind, llama: Option<&Arc<Llama>>, options: &Options, types: &[CacheType]) -> Self {
        let capacity = *options.decode.iter().max().expect("there is a size") + CHUNK;
        let params = Params {
            n_threads: options.n_threads,
            // A model of one layer could have no sparse one.
            dense: DenseLayers::None,
            ..Params::default()
        };
        let cache = |llama| {
            let new = |&t: &CacheType| (t, LlamaCache::new(llama, t, ROW, capacity));
            types.iter().map(new).collect()
        };
        Self {
            generator: Generator::new(kind, SEED, capacity),
            context: Context::new(model(), params).expect("the default parameters are valid"),
            dense: Dense::new(N_KV_HEADS, capacity),
            library: llama.cloned(),
            llama: llama.map_or(Vec::new(), cache),
            n_threads: options.n_threads,
            n_written: 0,
            n_committed: 0,
            pool: Pool::new(options.n_threads).expect("threads start"),
            seal: Samples::default(),
            copy: Samples::default(),
        }
    }

    fn rows(&self, first: usize, n: usize) -> (Vec<f16>, Vec<f16>) {
        let mut keys = vec![f16::ZERO; n * ROW];
        let mut values = keys.clone();
        self.generator.rows(first, &mut keys, &mut values, self.n_threads);
        (keys, values)
    }

    /// Fills the caches: the rivals' with `n_tokens`, the context with `n_open` fewer, which a
    /// pass will bring.
    fn fill(&mut self, n_tokens: usize, n_open: usize) {
        let mut wide = (Vec::new(), Vec::new());
        while self.n_written < n_tokens {
            let n = (n_tokens - self.n_written).min(CHUNK);
            let (keys, values) = self.rows(self.n_written, n);
            self.dense.write(self.n_written, &keys, &values);
            wide.0.resize(keys.len(), 0.0);
            wide.1.resize(keys.len(), 0.0);
            keys.convert_to_f32_slice(&mut wide.0);
            values.convert_to_f32_slice(&mut wide.1);
            for (_, cache) in &mut self.llama {
                cache.write(self.n_written, &wide.0, &wide.1);
            }
            self.n_written += n;
        }
        while self.n_committed < n_tokens - n_open {
            let n = (n_tokens - n_open - self.n_committed).min(CHUNK);
            let (mut keys, mut values) = self.rows(self.n_committed, n);
            begin(&mut self.context, self.n_committed, n);
            ingest(&mut self.context, &mut keys, &mut values);
            let mut q: Vec<f32> =
                (0..n).flat_map(|t| self.generator.query(self.n_committed + t, 0)).collect();
            self.context.observe(0, &view(&mut q, N_HEADS)).expect("observe");
            let seal = seconds(|| self.context.commit(None).expect("commit"));
            if n == CHUNK && self.n_committed > CHUNK {
                let mut copies = (vec![f16::ZERO; keys.len()], vec![f16::ZERO; keys.len()]);
                copies.0.fill(f16::ONE);
                copies.1.fill(f16::ONE);
                self.seal.wall.push(seal);
                self.copy.wall.push(
                    floor::copy(&mut self.pool, &keys, &mut copies.0)
                        + floor::copy(&mut self.pool, &values, &mut copies.1),
                );
            }
            self.n_committed += n;
        }
    }
}

fn model() -> Arc<Model> {
    let params = ModelParams {
        n_layer: 1,
        n_head: N_HEADS,
        n_head_kv: N_KV_HEADS,
        head_dim_k: DIM,
        head_dim_v: DIM,
        rope: RopeKind::Neox,
        n_head_per_layer: Some(vec![N_HEADS]),
        n_head_kv_per_layer: Some(vec![N_KV_HEADS]),
        ..ModelParams::default()
    };
    Arc::new(Model::from_params(&params).expect("the geometry is valid"))
}

/// A view of rows `[token][head][dim]`.
fn view<T: Element>(data: &mut [T], n_heads: usize) -> View {
    let n_tokens = data.len() / (n_heads * DIM);
    let size = size_of::<T>();
    // SAFETY: the rows are within `data`, which the callers keep alive over the call.
    unsafe {
        View::new(
            data.as_mut_ptr().cast(),
            T::DTYPE,
            [DIM, n_heads, n_tokens],
            [DIM * size, n_heads * DIM * size],
        )
    }
}

trait Element {
    const DTYPE: Dtype;
}

impl Element for f32 {
    const DTYPE: Dtype = Dtype::F32;
}

impl Element for f16 {
    const DTYPE: Dtype = Dtype::F16;
}

fn begin(context: &mut Context, first: usize, n: usize) {
    let batch: Vec<BatchToken> = (first..first + n)
        .map(|position| BatchToken { position: position as i32, sequences: &[0] })
        .collect();
    context.begin(&batch).expect("begin");
}

fn ingest(context: &mut Context, keys: &mut [f16], values: &mut [f16]) {
    context.ingest(0, &view(keys, N_KV_HEADS), &view(values, N_KV_HEADS)).expect("ingest");
}

/// Times an attend of the tokens that `fill` left open; the pass is taken back.
struct Pass<'a> {
    context: &'a mut Context,
    first: usize,
    keys: Vec<f16>,
    values: Vec<f16>,
    out: Vec<f32>,
}

impl Pass<'_> {
    /// Seconds of the attend, and of the whole pass.
    fn run(&mut self, q: &mut [f32]) -> (f64, f64) {
        let mut attend = 0.0;
        let pass = seconds(|| {
            begin(self.context, self.first, self.keys.len() / ROW);
            ingest(self.context, &mut self.keys, &mut self.values);
            let (q, out) = (view(q, N_HEADS), view(&mut self.out, N_HEADS));
            attend = seconds(|| self.context.attend(0, &q, None, &out).expect("attend"));
            self.context.abort().expect("abort");
        });
        (attend, pass)
    }
}

/// Largest difference of two outputs, over the largest magnitude of the right one.
fn difference(found: &[f32], right: &[f32]) -> f32 {
    let largest = right.iter().fold(0.0f32, |m, x| m.max(x.abs()));
    found.iter().zip(right).fold(0.0f32, |m, (f, r)| m.max((f - r).abs())) / largest
}

/// Says what the generated attention looks like: what a reader needs to judge the numbers by.
fn describe(dense: &Dense, queries: &[Vec<f32>], n_tokens: usize) {
    let (mut sink, mut near, mut large, mut deviation) = (0.0, 0.0, 0.0, 0.0);
    let n = (N_HEADS * 2) as f64;
    for q in &queries[..2] {
        for (h, q) in q.chunks(DIM).enumerate() {
            let scores = dense.scores(h / dense::GROUP, q, n_tokens);
            let top = scores.iter().fold(f32::MIN, |m, &s| m.max(s));
            let weights: Vec<f64> = scores.iter().map(|s| f64::from(s - top).exp()).collect();
            let sum: f64 = weights.iter().sum();
            sink += weights[..4].iter().sum::<f64>() / sum / n;
            near += weights[n_tokens - 128..].iter().sum::<f64>() / sum / n;
            let params = Params::default();
            let fall = (params.share_reference as f64 / n_tokens as f64).sqrt();
            let epsilon = f64::from(params.share_threshold) * fall;
            let far = &weights[4..n_tokens - 128];
            large += far.iter().filter(|&&w| w / sum > epsilon).count() as f64 / n;
            let far = &scores[4..n_tokens - 128];
            let mean = far.iter().sum::<f32>() / far.len() as f32;
            let variance = far.iter().map(|s| (s - mean).powi(2)).sum::<f32>() / far.len() as f32;
            deviation += f64::from(variance.sqrt()) / n;
        }
    }
    println!(
        "  attention: {:.0} % on the first 4 tokens, {:.0} % on the last 128, {large:.0} others \
         above epsilon a query head, scores deviate by {deviation:.2}",
        sink * 100.0,
        near * 100.0
    );
    let bounds = bounds::bounds(dense, &queries[..2], n_tokens);
    println!(
        "  blocks with no token above epsilon: {:.1} %; told by a bound from their channels' ranges: \
         {:.2} %, from their radius: {:.2} %",
        bounds.below * 100.0,
        bounds.by_channels * 100.0,
        bounds.by_radius * 100.0
    );
}

/// One token's attention: everything against everything.
fn decode(rivals: &mut Rivals, n_tokens: usize, n_rounds: usize, label: &str) -> Vec<Row> {
    rivals.fill(n_tokens, 1);
    let queries: Vec<Vec<f32>> =
        (0..N_QUERIES).map(|i| rivals.generator.query(n_tokens - 1, i)).collect();
    println!("\n{n_tokens} tokens, one query{label}");
    describe(&rivals.dense, &queries, n_tokens);
    let (keys, values) = rivals.rows(n_tokens - 1, 1);
    let n_threads = rivals.n_threads;
    let Rivals { context, dense, library, llama, pool, .. } = rivals;
    let mut dense_scratch = DenseScratch::default();

    // What a step chooses, and how far the answers are from the dense one.
    let out = vec![0.0; N_HEADS * DIM];
    let mut pass = Pass { context, first: n_tokens - 1, keys, values, out };
    let before = pass.context.statistics();
    let (mut worst, mut mean) = (0.0f32, 0.0);
    let mut llama_worst = vec![0.0f32; llama.len()];
    for q in &queries {
        pass.run(&mut q.clone());
        let mut right = vec![0.0; N_HEADS * DIM];
        dense.attend(pool, &mut dense_scratch, q, n_tokens, &mut right);
        let error = difference(&pass.out, &right);
        worst = worst.max(error);
        mean += error / N_QUERIES as f32;
        for ((_, cache), worst) in llama.iter().zip(&mut llama_worst) {
            let mut attention = cache.attention(n_threads, n_tokens, 1);
            attention.rest(false);
            attention.set_queries(q);
            attention.compute();
            *worst = worst.max(difference(&attention.output(), &right));
        }
    }
    let after = pass.context.statistics();
    let step = Step::new(&before, &after);
    println!(
        "  libsekv: {:.0} tokens fetched and {:.0} in the middle a KV head, output within {:.3} \
         (mean {:.3}) of the dense one's largest value, llama.cpp's f16, q8_0, q4_0 \
         within {:.3?}",
        step.fetched, step.middle, worst, mean, llama_worst
    );

    let reading = Reading::new(step.bytes());
    let pool = RefCell::new(pool);
    let pass_seconds = RefCell::new(Vec::new());
    let mut number = 0;
    let mut next = || {
        number += 1;
        number % N_QUERIES
    };
    let mut dense_out = vec![0.0; N_HEADS * DIM];
    let mut works: Vec<Work> = vec![
        Box::new(|| {
            let (attend, whole) = pass.run(&mut queries[next()].clone());
            pass_seconds.borrow_mut().push(whole);
            attend
        }),
        Box::new(|| reading.read(*pool.borrow_mut())),
        Box::new(|| {
            let rates = Rates::measure(*pool.borrow_mut());
            rates.map_or(0.0, |rates| step.arithmetic(SKETCH, &rates))
        }),
        Box::new(|| {
            let mut pool = pool.borrow_mut();
            let scratch = &mut dense_scratch;
            seconds(|| dense.attend(*pool, scratch, &queries[0], n_tokens, &mut dense_out))
        }),
    ];
    let mut names = Vec::new();
    let (keys, values) = dense.rows();
    let mut attentions: Vec<LlamaAttention> = Vec::new();
    if let Some(library) = library {
        names.push("attend: llama.cpp f16, head by head".to_string());
        attentions.push(library.attention_by_head(n_threads, n_tokens, keys, values));
    }
    for (cache_type, cache) in llama.iter() {
        names.push(format!("attend: llama.cpp {cache_type:?}").to_lowercase());
        attentions.push(cache.attention(n_threads, n_tokens, 1));
    }
    for mut attention in attentions {
        attention.set_queries(&queries[0]);
        works.push(Box::new(move || {
            attention.rest(false);
            let time = seconds(|| attention.compute());
            attention.rest(true);
            time
        }));
    }
    let samples = alternate(&mut works, n_rounds);
    drop(works);
    let whole = Samples { wall: pass_seconds.into_inner(), ..Samples::default() };
    let (read, arithmetic) = (&samples[1], &samples[2]);
    let larger = |(a, b): (&f64, &f64)| a.max(*b);
    let wall = read.wall.iter().zip(&arithmetic.wall).map(larger).collect();
    let floor = Samples { wall, ..Samples::default() };
    println!(
        "  floor: {:.1} MB at {:.1} GB/s {:.3} ms, arithmetic {:.3} ms; whole pass {:.3} ms",
        step.bytes() / 1e6,
        step.bytes() / read.median() / 1e9,
        read.median() * 1e3,
        arithmetic.median() * 1e3,
        whole.median() * 1e3
    );

    // Of its two layouts the one that is kinder to it.
    let ggml = samples[4..].iter().take(2).min_by(|a, b| a.median().total_cmp(&b.median()));
    let row = |name: &str, samples: &Samples, of_floor: Option<f64>| Row {
        name: format!("{name}{label}"),
        n_ctx: n_tokens,
        samples: samples.clone(),
        vs_ggml: ggml.map(|ggml| samples.ratio(ggml)),
        vs_dense: None,
        of_floor,
    };
    let mut rows = vec![
        row("attend", &samples[0], Some(samples[0].ratio(&floor))),
        row("attend: read the bytes", read, None),
        row("attend: dense f16", &samples[3], None),
    ];
    if arithmetic.median() > 0.0 {
        rows.insert(2, row("attend: do the arithmetic", arithmetic, None));
    }
    for (name, samples) in names.iter().zip(&samples[4..]) {
        rows.push(row(name, samples, None));
    }
    for row in &mut rows {
        row.vs_dense = Some(row.samples.ratio(&samples[3]));
    }
    rows
}

/// Attends for ten seconds.
fn profile(options: &Options, n_tokens: usize) {
    let mut rivals = Rivals::new(Kind::Realistic, None, options, &[]);
    rivals.fill(n_tokens, 1);
    let (keys, values) = rivals.rows(n_tokens - 1, 1);
    let mut queries: Vec<Vec<f32>> =
        (0..N_QUERIES).map(|i| rivals.generator.query(n_tokens - 1, i)).collect();
    let (first, out) = (n_tokens - 1, vec![0.0; N_HEADS * DIM]);
    let mut pass = Pass { context: &mut rivals.context, first, keys, values, out };
    let before = pass.context.statistics();
    for q in &mut queries {
        pass.run(q);
    }
    let step = Step::new(&before, &pass.context.statistics());
    println!(
        "{:.0} fetched, {:.0} in the middle a KV head, {:.1} MB to read",
        step.fetched,
        step.middle,
        step.bytes() / 1e6
    );
    println!("attends from here on");
    let cpu = rounds::cpu_seconds();
    let (started, mut times) = (Instant::now(), Samples::default());
    while started.elapsed().as_secs() < 10 {
        times.wall.push(pass.run(&mut queries[times.wall.len() % N_QUERIES]).0);
    }
    println!(
        "{} passes, median attend {:.3} ms, processor time {:.3} ms a pass",
        times.wall.len(),
        times.median() * 1e3,
        (rounds::cpu_seconds() - cpu) / times.wall.len() as f64 * 1e3
    );
}

/// A chunk of queries over everything before and each other.
fn prefill(rivals: &mut Rivals, n_tokens: usize, n_rounds: usize) -> Vec<Row> {
    rivals.fill(n_tokens, PREFILL_CHUNK);
    let first = n_tokens - PREFILL_CHUNK;
    println!("\n{n_tokens} tokens, {PREFILL_CHUNK} queries");
    let mut q: Vec<f32> =
        (first..n_tokens).flat_map(|token| rivals.generator.query(token, 0)).collect();
    let (keys, values) = rivals.rows(first, PREFILL_CHUNK);
    let n_threads = rivals.n_threads;
    let Rivals { context, llama, .. } = rivals;
    let out = vec![0.0; q.len()];
    let mut pass = Pass { context, first, keys, values, out };
    pass.run(&mut q);
    let mut llama_attention = llama.iter().find(|(t, _)| *t == CacheType::F16).map(|(_, cache)| {
        let mut attention = cache.attention(n_threads, n_tokens, PREFILL_CHUNK);
        attention.set_queries(&q);
        attention.rest(false);
        attention.compute();
        let error = difference(&pass.out, &attention.output());
        println!("  libsekv's output within {error:.4} of llama.cpp's");
        attention.rest(true);
        attention
    });
    let mut works: Vec<Work> = vec![Box::new(|| pass.run(&mut q).0)];
    if let Some(attention) = &mut llama_attention {
        works.push(Box::new(|| {
            attention.rest(false);
            let time = seconds(|| attention.compute());
            attention.rest(true);
            time
        }));
    }
    let samples = alternate(&mut works, n_rounds);
    drop(works);
    let names = ["prefill 512", "prefill 512: llama.cpp f16"];
    let rows = names.iter().zip(&samples).map(|(name, own)| Row {
        name: name.to_string(),
        n_ctx: n_tokens,
        samples: own.clone(),
        vs_ggml: samples.get(1).map(|ggml| own.ratio(ggml)),
        vs_dense: None,
        of_floor: None,
    });
    rows.collect()
}

fn main() {
    // `cargo test --benches` only wants to know that it builds.
    if std::env::args().any(|a| a == "--test") {
        return;
    }
    let options = Options::from_arguments();
    if let Some(n_tokens) = options.profile {
        profile(&options, n_tokens);
        return;
    }
    let llama = Llama::load();
    if let Err(message) = &llama {
        println!("without llama.cpp's attention ({message})");
    }
    let llama = llama.ok();
    println!(
        "{} threads, {} rounds; {}; seed {SEED}{}",
        options.n_threads,
        options.n_rounds,
        Level::best().name(),
        if options.quick { "; --quick" } else { "" }
    );

    let mut rows = Vec::new();
    let types = [CacheType::F16, CacheType::Q8, CacheType::Q4];
    let mut rivals = Rivals::new(Kind::Realistic, llama.as_ref(), &options, &types);
    // Contexts only grow.
    let mut sizes: Vec<(usize, bool)> = options.prefill.iter().map(|&n| (n, false)).collect();
    sizes.extend(options.decode.iter().map(|&n| (n, true)));
    sizes.sort_unstable();
    for (n_tokens, is_decode) in sizes {
        rows.extend(if is_decode {
            decode(&mut rivals, n_tokens, options.n_rounds, "")
        } else {
            prefill(&mut rivals, n_tokens, options.n_rounds)
        });
    }
    let gigabytes = (2 * CHUNK * ROW * 2) as f64 / 1e9;
    let (seal, copy) = (rivals.seal.clone(), rivals.copy.clone());
    println!(
        "\nseal: {:.2} GB/s of f16 keys and values, a copy of them {:.2} GB/s, median of {} chunks",
        gigabytes / seal.median(),
        gigabytes / copy.median(),
        seal.wall.len()
    );
    let of_copy = seal.ratio(&copy);
    for (name, samples, of_floor) in
        [("seal 2048", seal, Some(of_copy)), ("seal 2048: copy", copy, None)]
    {
        let n_ctx = rivals.n_committed;
        rows.push(Row {
            name: name.into(),
            n_ctx,
            samples,
            vs_ggml: None,
            vs_dense: None,
            of_floor,
        });
    }
    drop(rivals);

    let mut rivals = Rivals::new(Kind::Gaussian, llama.as_ref(), &options, &types[..1]);
    for &n_tokens in &options.decode {
        let n_rounds = options.n_rounds.min(5);
        rows.extend(decode(&mut rivals, n_tokens, n_rounds, ", Gaussian keys"));
    }

    println!(
        "\n| what | tokens | median ms | processor ms | spread | times llama.cpp f16 | times dense | of floor |"
    );
    println!("|---|---|---|---|---|---|---|---|");
    rows.iter().for_each(Row::print);
    let path = if Level::available().last() == Some(&Level::best()) {
        concat!(env!("CARGO_MANIFEST_DIR"), "/target/bench.json").to_string()
    } else {
        format!("{}/target/bench-{}.json", env!("CARGO_MANIFEST_DIR"), Level::best().name())
    };
    let json = json!({ "rows": rows.iter().map(Row::json).collect::<Vec<_>>() });
    std::fs::write(path, format!("{json:#}\n")).expect("target/bench.json can be written");
}
