//! Sequences beside plain lists of their tokens: every operation is done to both, and every output
//! compared with dense attention in f64.

use super::{Random, Shape, dense, difference, raw_params, sealed_params, view};
use sekv::cache::{BatchToken, Context};
use sekv::error::{Error, Result, Status};
use sekv::kernels::RowCodec;
use sekv::params::{BasisCodec, Params, RoutingKind};
use sekv::store::BasisIo;

pub const LAYERS: usize = 2;
pub const HEADS: usize = 4;
pub const KV_HEADS: usize = 2;
pub const DIM: usize = 16;
pub const SEQUENCES: usize = 4;

/// f32 sums of some hundred terms.
pub const ROUNDING: f32 = 2e-5;
/// Routing paper: coarse rows of zoomed spans, at a weight of 1e-6, and f32 factors.
pub const ZOOMED: f32 = 2e-4;

/// One token as it came in: `[layer]`, then all KV heads.
#[derive(Clone)]
pub struct Token {
    pub position: i32,
    /// Positions that it has moved by since.
    pub shift: i32,
    pub keys: Vec<Vec<f32>>,
    pub values: Vec<Vec<f32>>,
}

impl Token {
    /// A layer's keys where the token is now: RoPE of half-split pairs, base 10,000, in f64. Hosts
    /// keep frequencies as f32.
    pub fn keys(&self, layer: usize) -> Vec<f32> {
        let mut keys = self.keys[layer].clone();
        if self.shift == 0 {
            return keys;
        }
        for key in keys.chunks_mut(DIM) {
            for i in 0..DIM / 2 {
                let frequency = 1e4f64.powf(-2.0 * i as f64 / DIM as f64) as f32;
                let (sin, cos) = (f64::from(self.shift) * f64::from(frequency)).sin_cos();
                let (x, y) = (f64::from(key[i]), f64::from(key[i + DIM / 2]));
                key[i] = (x * cos - y * sin) as f32;
                key[i + DIM / 2] = (x * sin + y * cos) as f32;
            }
        }
        keys
    }
}

pub struct World {
    pub context: Context,
    pub params: Params,
    pub lists: Vec<Vec<Token>>,
    pub random: Random,
    /// Commits give surprisal.
    pub surprisal: bool,
    pub worst: f32,
    /// Rows that queries attended over, and how many of them were sealed: those of earlier passes
    /// by the share that is sealed of all that the context holds.
    pub attended: f64,
    pub sealed: f64,
}

impl World {
    pub fn new(params: Params, seed: u64) -> Self {
        let params = Params { n_seq_max: SEQUENCES, n_threads: 1, ..params };
        let surprisal = params.routing == RoutingKind::Paper;
        Self {
            context: new_context(&params),
            params,
            lists: vec![Vec::new(); SEQUENCES],
            random: Random(seed),
            surprisal,
            worst: 0.0,
            attended: 0.0,
            sealed: 0.0,
        }
    }

    pub fn last(&self, s: usize) -> i32 {
        self.lists[s].last().map_or(-1, |token| token.position)
    }

    /// A pass of tokens with their sequences, at positions `gap` beyond the last ones; aborted or
    /// committed.
    pub fn pass(&mut self, members: &[Vec<i32>], gap: i32, commit: bool) {
        let n = members.len();
        let before: Vec<usize> = self.lists.iter().map(Vec::len).collect();
        let mut tokens = Vec::new();
        for sequences in members {
            let last = sequences.iter().map(|&s| self.last(s as usize)).max().unwrap();
            let position = last + 1 + gap;
            let token = Token { position, shift: 0, keys: Vec::new(), values: Vec::new() };
            sequences.iter().for_each(|&s| self.lists[s as usize].push(token.clone()));
            tokens.push(BatchToken { position, sequences });
        }
        self.context.begin(&tokens).unwrap();
        let statistics = self.context.statistics();
        let share_sealed = statistics.n_sealed as f64 / statistics.n_tokens.max(1) as f64;
        let mut seen = vec![0; members.len()];
        for (i, sequences) in members.iter().enumerate() {
            let s = sequences[0];
            let own = members[..=i].iter().filter(|m| m.contains(&s)).count();
            seen[i] = before[s as usize] + own;
        }
        for il in 0..LAYERS {
            let mut k = self.random.normals(n * KV_HEADS * DIM);
            // A centre worth the name.
            k.iter_mut().enumerate().for_each(|(i, x)| *x += (i % DIM) as f32 * 0.1);
            let mut v = self.random.normals(n * KV_HEADS * DIM);
            let mut q = self.random.normals(n * HEADS * DIM);
            let mut out = vec![f32::NAN; n * HEADS * DIM];
            let (k_view, v_view) = (view(&mut k, DIM, KV_HEADS, n), view(&mut v, DIM, KV_HEADS, n));
            self.context.ingest(il, &k_view, &v_view).unwrap();
            let (q_view, out_view) = (view(&mut q, DIM, HEADS, n), view(&mut out, DIM, HEADS, n));
            self.context.attend(il, &q_view, None, &out_view).unwrap();
            let mut next = before.clone();
            for (t, sequences) in members.iter().enumerate() {
                for &s in sequences {
                    let token = &mut self.lists[s as usize][next[s as usize]];
                    token.keys.push(k[t * KV_HEADS * DIM..][..KV_HEADS * DIM].to_vec());
                    token.values.push(v[t * KV_HEADS * DIM..][..KV_HEADS * DIM].to_vec());
                    next[s as usize] += 1;
                }
            }
            // Each sequence's rows, as they are where its tokens are.
            let mut rows: Vec<Option<[Vec<Vec<f32>>; 2]>> = vec![None; SEQUENCES];
            for (t, sequences) in members.iter().enumerate() {
                let s = sequences[0] as usize;
                let [keys, values] = rows[s].get_or_insert_with(|| {
                    let values = self.lists[s].iter().map(|token| token.values[il].clone());
                    [self.lists[s].iter().map(|token| token.keys(il)).collect(), values.collect()]
                });
                let (keys, values) = (&keys[..seen[t]], &values[..seen[t]]);
                for h in 0..HEADS {
                    let row = (t * HEADS + h) * DIM..(t * HEADS + h + 1) * DIM;
                    let want = dense(&q[row.clone()], h / 2, keys, values, DIM, DIM);
                    self.worst = self.worst.max(difference(&out[row], &want));
                }
                self.attended += seen[t] as f64;
                self.sealed += before[s] as f64 * share_sealed;
            }
        }
        if commit {
            let surprisal: Vec<f32> =
                (0..n).map(|_| -self.random.uniform().max(1e-7).ln()).collect();
            self.context.commit(self.surprisal.then_some(&surprisal)).unwrap();
        } else {
            self.context.abort().unwrap();
            self.lists.iter_mut().zip(before).for_each(|(list, n)| list.truncate(n));
        }
    }

    /// A pass of `n` tokens of one sequence.
    pub fn extend(&mut self, s: usize, n: usize) {
        self.pass(&vec![vec![s as i32]; n], 0, true);
    }

    pub fn copy(&mut self, from: usize, to: usize, first: i32, end: i32) {
        self.context.copy(from as i32, to as i32, first, end).unwrap();
        if from != to {
            let tokens = self.lists[from].iter().filter(|t| within(t, first, end));
            self.lists[to] = tokens.cloned().collect();
        }
    }

    /// Removes positions `first..end` of a sequence, or of all.
    pub fn remove(&mut self, s: i32, first: i32, end: i32) {
        self.context.remove(s, first, end).unwrap();
        for (i, list) in self.lists.iter_mut().enumerate() {
            if s < 0 || s == i as i32 {
                list.retain(|token| !within(token, first, end));
            }
        }
    }

    /// Moves positions `first..end` of a sequence.
    pub fn shift(&mut self, s: usize, first: i32, end: i32, delta: i32) {
        self.context.shift(s as i32, first, end, delta).unwrap();
        for token in self.lists[s].iter_mut().filter(|token| within(token, first, end)) {
            token.position += delta;
            token.shift += delta;
        }
    }

    /// The bytes of a state: of one sequence, or of all (-1).
    pub fn save(&self, s: i32) -> Saved {
        let mut bytes = Vec::new();
        let sink = &mut |part: &[u8]| {
            bytes.extend_from_slice(part);
            Ok(())
        };
        self.context.save_to(s, sink).unwrap();
        assert_eq!(self.context.state_size(s).unwrap(), bytes.len() as u64);
        let lists = match s {
            -1 => self.lists.clone(),
            s => vec![self.lists[s as usize].clone()],
        };
        Saved { s, bytes, lists }
    }

    /// Loads a state: into sequence `to` where it is one sequence's.
    pub fn load(&mut self, saved: &Saved, to: usize) {
        let id = if saved.s < 0 { -1 } else { to as i32 };
        load(&mut self.context, id, &saved.bytes).unwrap();
        match saved.s {
            -1 => self.lists.clone_from(&saved.lists),
            _ => self.lists[to].clone_from(&saved.lists[0]),
        }
    }

    /// Goes on in a new context, as a new process would.
    pub fn move_to_a_new_context(&mut self) {
        let saved = self.save(-1);
        self.context = new_context(&self.params);
        self.load(&saved, 0);
    }

    /// Positions, and a step of every sequence that has tokens.
    pub fn check(&mut self, bound: f32, what: &str) {
        let mut members = Vec::new();
        for s in 0..SEQUENCES {
            let min = self.lists[s].first().map_or(-1, |token| token.position);
            assert_eq!(self.context.position_min(s as i32).unwrap(), min, "{what}");
            assert_eq!(self.context.position_max(s as i32).unwrap(), self.last(s), "{what}");
            if min >= 0 {
                members.push(vec![s as i32]);
            }
        }
        let n_tokens: usize = self.lists.iter().map(Vec::len).sum();
        assert_eq!(self.context.statistics().n_tokens, n_tokens as u64, "{what}");
        if !members.is_empty() {
            self.pass(&members, 0, false);
        }
        assert!(self.worst < bound, "{what}: {}", self.worst);
        assert_eq!(self.context.take_events(), [], "{what}");
    }
}

pub fn within(token: &Token, first: i32, end: i32) -> bool {
    token.position >= first && (end < 0 || token.position < end)
}

pub fn small(block_tokens: usize) -> Params {
    Params { n_sinks: 2, window: 3, ..sealed_params(block_tokens) }
}

pub fn small_paper() -> Params {
    Params {
        routing: RoutingKind::Paper,
        n_sinks: 2,
        window: 3,
        block_tokens: 1,
        layout_tokens: 4,
        // Untrained, the gate of a span of so many tokens is above the threshold for any query here.
        span_min: 4,
        rank_max: 512,
        basis_codec: BasisCodec::LowRank(RowCodec::F32),
        ..raw_params()
    }
}

pub fn both_routings() -> [(Params, f32); 2] {
    [(small(4), ROUNDING), (small_paper(), ZOOMED)]
}

/// A state, and what it holds.
pub struct Saved {
    pub s: i32,
    pub bytes: Vec<u8>,
    pub lists: Vec<Vec<Token>>,
}

pub fn new_context(params: &Params) -> Context {
    let shape = Shape::uniform(LAYERS, HEADS, KV_HEADS, DIM);
    Context::new(shape.model(), params.clone()).unwrap()
}

/// Loads a state from its bytes, of which all are read.
pub fn load(context: &mut Context, id: i32, bytes: &[u8]) -> Result<()> {
    let mut rest = bytes;
    context.load_from(id, None, &mut |out| {
        let Some((part, more)) = rest.split_at_checked(out.len()) else {
            return Err(Error::new(Status::Format, "the bytes end before the state does"));
        };
        out.copy_from_slice(part);
        rest = more;
        Ok(())
    })?;
    assert!(rest.is_empty(), "{} bytes were not read", rest.len());
    Ok(())
}

/// The slow tier in memory, and in basis files of both kinds.
pub fn media() -> [Params; 3] {
    let folder = Some(std::env::temp_dir());
    [
        Params::default(),
        Params { basis_folder: folder.clone(), basis_io: BasisIo::Mmap, ..Params::default() },
        Params { basis_folder: folder, basis_io: BasisIo::Pread, ..Params::default() },
    ]
}

/// The same params on another medium.
pub fn on(medium: &Params, params: &Params) -> Params {
    let (basis_folder, basis_io) = (medium.basis_folder.clone(), medium.basis_io);
    Params { basis_folder, basis_io, ..params.clone() }
}

/// One token's rows of every layer, and its queries: `[layer]`.
pub struct Step {
    pub keys: Vec<Vec<f32>>,
    pub values: Vec<Vec<f32>>,
    pub queries: Vec<Vec<f32>>,
}

impl Step {
    pub fn new(random: &mut Random) -> Self {
        let mut rows = |n: usize| (0..LAYERS).map(|_| random.normals(n * DIM)).collect();
        Self { keys: rows(KV_HEADS), values: rows(KV_HEADS), queries: rows(HEADS) }
    }

    pub fn moved_by(&self, shift: i32) -> Self {
        let values = self.values.clone();
        let turned = |keys: &Vec<Vec<f32>>| {
            let token = Token { position: 0, shift, keys: keys.clone(), values: Vec::new() };
            (0..LAYERS).map(|il| token.keys(il)).collect()
        };
        Self { keys: turned(&self.keys), values, queries: turned(&self.queries) }
    }

    /// The outputs of a pass of this token in sequence 0, which is aborted.
    pub fn attend(&self, context: &mut Context) -> Vec<f32> {
        let position = context.position_max(0).unwrap() + 1;
        context.begin(&[BatchToken { position, sequences: &[0] }]).unwrap();
        let mut outputs = Vec::new();
        for il in 0..LAYERS {
            let (mut k, mut v) = (self.keys[il].clone(), self.values[il].clone());
            let (mut q, mut out) = (self.queries[il].clone(), vec![f32::NAN; HEADS * DIM]);
            let (k, v) = (view(&mut k, DIM, KV_HEADS, 1), view(&mut v, DIM, KV_HEADS, 1));
            context.ingest(il, &k, &v).unwrap();
            let (q, out_view) = (view(&mut q, DIM, HEADS, 1), view(&mut out, DIM, HEADS, 1));
            context.attend(il, &q, None, &out_view).unwrap();
            outputs.extend(out);
        }
        context.abort().unwrap();
        outputs
    }
}
