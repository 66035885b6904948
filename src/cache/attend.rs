//! The attention of one layer's queries over one sequence.

use super::pass::{PassSequence, Staged};
use super::sequence::Sequence;
use crate::attend::{ROWS_AT_ONCE, RowScratch, SoftmaxState, TurnedQuery, attend_rows};
use crate::kernels::{RowCodec, tile_attend, tile_scratch_len};
use crate::model::Geometry;
use crate::pool::Team;
use crate::routing::{Plan, Queries, RouteLimits};

/// Passes of more queries of one sequence attend over tiles of every token.
pub const ROUTED_QUERIES: usize = 16;

/// Keys of one tile, and query rows of one work item: 2 x 128 x 128 f32 of keys and values and
/// 256 x 128 weights stay in the second-level cache.
const TILE_KEYS: usize = 128;
const TILE_QUERIES: usize = 256;

/// Buffers of one unit.
#[derive(Default)]
pub struct UnitScratch {
    rows: RowScratch,
    turned: TurnedQuery,
    key_bytes: Vec<u8>,
    value_bytes: Vec<u8>,
}

/// What one layer's routed queries need: kept between calls.
#[derive(Default)]
pub struct RoutedScratch {
    pub states: Vec<SoftmaxState>,
    pub units: Vec<UnitScratch>,
    pub plan: Option<Box<dyn Plan>>,
}

/// One sequence with the rows that the running pass has brought.
#[derive(Clone, Copy)]
pub struct View<'a> {
    pub geometry: &'a Geometry,
    pub sequence: &'a Sequence,
    pub staged: &'a Staged,
    /// Whether the layer's rows are staged; a route may come before them.
    pub has_rows: bool,
}

impl View<'_> {
    /// Softmax states over residents and the pass's rows, for `queries` that begin at row
    /// `rows[0]` of the pass: unit's token i sees the pass's rows up to `rows[i]`.
    pub fn residents(
        &self,
        team: &Team,
        queries: &Queries,
        rows: &[usize],
        states: &mut Vec<SoftmaxState>,
        scratch: &mut Vec<UnitScratch>,
    ) {
        let n_units = queries.n_units;
        if states.len() < n_units {
            states.resize_with(n_units, SoftmaxState::default);
            scratch.resize_with(n_units, UnitScratch::default);
        }
        let (states, scratch) = (&mut states[..n_units], &mut scratch[..n_units]);
        team.for_each_pair(states, scratch, |unit, state, scratch| {
            state.reset(queries.n_group, self.geometry.value_dim);
            let head = unit % queries.n_kv_heads;
            let row = rows[unit / queries.n_kv_heads];
            self.resident_rows(queries.layer, head, queries.unit(unit), state, scratch);
            if self.has_rows {
                self.staged_rows(queries.layer, head, row, queries.unit(unit), state, scratch);
            }
        });
    }

    fn resident_rows(
        &self,
        layer: usize,
        head: usize,
        q: &[f32],
        state: &mut SoftmaxState,
        scratch: &mut UnitScratch,
    ) {
        let residents = &self.sequence.residents;
        if residents.is_turned() {
            return self.turned_rows(layer, head, q, state, scratch);
        }
        let mut keys: [&[u8]; ROWS_AT_ONCE] = [&[]; ROWS_AT_ONCE];
        let mut values: [&[u8]; ROWS_AT_ONCE] = [&[]; ROWS_AT_ONCE];
        for start in (0..residents.n_rows()).step_by(ROWS_AT_ONCE) {
            let n = (residents.n_rows() - start).min(ROWS_AT_ONCE);
            for i in 0..n {
                keys[i] = residents.key(layer, head, start + i);
                values[i] = residents.value(layer, head, start + i);
            }
            let (codec, dim) = (residents.codec(), self.geometry.key_dim);
            attend_rows(codec, dim, q, &keys[..n], &values[..n], None, state, &mut scratch.rows);
        }
    }

    /// Residents of which some have moved, in runs that have moved alike.
    fn turned_rows(
        &self,
        layer: usize,
        head: usize,
        q: &[f32],
        state: &mut SoftmaxState,
        scratch: &mut UnitScratch,
    ) {
        let residents = &self.sequence.residents;
        let (codec, dim) = (residents.codec(), self.geometry.key_dim);
        let shift = |row: usize| residents.turn(row).map(|turn| turn.shift);
        let mut start = 0;
        while start < residents.n_rows() {
            let alike = (start..residents.n_rows()).take_while(|&row| shift(row) == shift(start));
            let end = start + alike.count();
            let keys: Vec<&[u8]> =
                (start..end).map(|row| residents.key(layer, head, row)).collect();
            let values: Vec<&[u8]> =
                (start..end).map(|row| residents.value(layer, head, row)).collect();
            let UnitScratch { rows, turned, .. } = scratch;
            match residents.turn(start) {
                Some(rotation) => {
                    turned.turn(rotation, self.centre(layer, head), q, state.n_group());
                    turned.attend_rows(codec, dim, &keys, &values, state, rows);
                }
                None => attend_rows(codec, dim, q, &keys, &values, None, state, rows),
            }
            start = end;
        }
    }

    /// What residents and sealed tokens are stored less; empty where that is nothing.
    fn centre(&self, layer: usize, head: usize) -> &[f32] {
        self.sequence.sealed.centre(layer, head).unwrap_or(&[])
    }

    /// The pass's rows 0..=last, as they came in.
    fn staged_rows(
        &self,
        layer: usize,
        head: usize,
        last: usize,
        q: &[f32],
        state: &mut SoftmaxState,
        scratch: &mut UnitScratch,
    ) {
        let (key_dim, value_dim) = (self.geometry.key_dim, self.geometry.value_dim);
        let codec = RowCodec::F32;
        let (key_len, value_len) = (codec.row_bytes(key_dim), codec.row_bytes(value_dim));
        scratch.key_bytes.resize((last + 1) * key_len, 0);
        scratch.value_bytes.resize((last + 1) * value_len, 0);
        for row in 0..=last {
            let out = &mut scratch.key_bytes[row * key_len..][..key_len];
            codec.encode(self.staged.key(layer, head, row), out);
            let out = &mut scratch.value_bytes[row * value_len..][..value_len];
            codec.encode(self.staged.value(layer, head, row), out);
        }
        let mut keys: [&[u8]; ROWS_AT_ONCE] = [&[]; ROWS_AT_ONCE];
        let mut values: [&[u8]; ROWS_AT_ONCE] = [&[]; ROWS_AT_ONCE];
        for start in (0..=last).step_by(ROWS_AT_ONCE) {
            let n = (last + 1 - start).min(ROWS_AT_ONCE);
            for i in 0..n {
                keys[i] = &scratch.key_bytes[(start + i) * key_len..][..key_len];
                values[i] = &scratch.value_bytes[(start + i) * value_len..][..value_len];
            }
            let (keys, values) = (&keys[..n], &values[..n]);
            attend_rows(codec, key_dim, q, keys, values, None, state, &mut scratch.rows);
        }
    }

    /// Scores the sealed tokens and chooses; `states` come from `residents`.
    pub fn route(
        &self,
        team: &Team,
        queries: &Queries,
        states: &[SoftmaxState],
        limits: RouteLimits,
        plan: &mut Option<Box<dyn Plan>>,
    ) {
        let plan = plan.get_or_insert_with(|| self.sequence.sealed.new_plan());
        self.sequence.sealed.route(team, queries, states, limits, &mut **plan);
    }

    /// Exact attention of many queries, over tiles of keys that are read back as they are needed.
    ///
    /// `q` is `[token][n_heads][key_dim]`, scaled, of the part's attending tokens; `out` is
    /// `[token][n_heads][value_dim]`.
    pub fn tiles(
        &self,
        team: &Team,
        part: &PassSequence,
        layer: usize,
        q: &[f32],
        out: &mut [f32],
    ) {
        let shape = self.geometry.layers[layer];
        let (group, n_kv_heads) = (shape.group(), shape.n_kv_heads);
        let (dk, dv) = (self.geometry.key_dim, self.geometry.value_dim);
        let chunk = (TILE_QUERIES / group).clamp(1, TILE_QUERIES);
        let n_chunks = part.attending.len().div_ceil(chunk);
        let mut items: Vec<Vec<f32>> = vec![Vec::new(); n_chunks * n_kv_heads];
        team.for_each_mut(&mut items, |i, item_out| {
            let (head, first) = (i % n_kv_heads, i / n_kv_heads * chunk);
            let rows = &part.attending[first..(first + chunk).min(part.attending.len())];
            let mut item = TileItem::new(dk, dv, group, rows);
            for (t, q_rows) in item.q.chunks_mut(group * dk).enumerate() {
                let start = ((first + t) * shape.n_heads + head * group) * dk;
                q_rows.copy_from_slice(&q[start..start + group * dk]);
            }
            self.tile_item(layer, head, &mut item);
            *item_out = item.finish();
        });
        for (i, item) in items.iter().enumerate() {
            let (head, first) = (i % n_kv_heads, i / n_kv_heads * chunk);
            for (t, rows) in item.chunks(group * dv).enumerate() {
                let start = ((first + t) * shape.n_heads + head * group) * dv;
                out[start..start + group * dv].copy_from_slice(rows);
            }
        }
    }

    fn tile_item(&self, layer: usize, head: usize, item: &mut TileItem) {
        let (sequence, dk, dv) = (self.sequence, item.dk, item.dv);
        let mut keys = vec![0.0; TILE_KEYS * dk];
        let mut values = vec![0.0; TILE_KEYS * dv];
        let residents = &sequence.residents;
        for start in (0..residents.n_rows()).step_by(TILE_KEYS) {
            let n = (residents.n_rows() - start).min(TILE_KEYS);
            for (row, (k, v)) in keys.chunks_mut(dk).zip(values.chunks_mut(dv)).take(n).enumerate()
            {
                residents.codec().decode(residents.key(layer, head, start + row), k);
                residents.codec().decode(residents.value(layer, head, start + row), v);
                if let Some(rotation) = residents.turn(start + row) {
                    rotation.apply_centred(k, self.centre(layer, head));
                }
            }
            item.attend(&keys[..n * dk], &values[..n * dv], None);
        }
        for start in (0..sequence.sealed.n_tokens()).step_by(TILE_KEYS) {
            let n = (sequence.sealed.n_tokens() - start).min(TILE_KEYS);
            let (k, v) = (&mut keys[..n * dk], &mut values[..n * dv]);
            sequence.sealed.read(layer, head, start, n, k, v);
            item.attend(k, v, None);
        }
        let last = item.rows.last().map_or(0, |&row| row + 1);
        for start in (0..last).step_by(TILE_KEYS) {
            let n = (last - start).min(TILE_KEYS);
            for (row, (k, v)) in keys.chunks_mut(dk).zip(values.chunks_mut(dv)).take(n).enumerate()
            {
                k.copy_from_slice(self.staged.key(layer, head, start + row));
                v.copy_from_slice(self.staged.value(layer, head, start + row));
            }
            item.attend(&keys[..n * dk], &values[..n * dv], Some(start));
        }
    }
}

/// Some tokens' query heads of one KV head, on their way over tiles of keys.
struct TileItem<'a> {
    dk: usize,
    dv: usize,
    group: usize,
    /// The pass's row of each token.
    rows: &'a [usize],
    q: Vec<f32>,
    visible: Vec<u32>,
    m: Vec<f32>,
    l: Vec<f32>,
    o: Vec<f32>,
    scratch: Vec<f32>,
}

impl<'a> TileItem<'a> {
    fn new(dk: usize, dv: usize, group: usize, rows: &'a [usize]) -> Self {
        let n = rows.len() * group;
        Self {
            dk,
            dv,
            group,
            rows,
            q: vec![0.0; n * dk],
            visible: vec![0; n],
            m: vec![f32::NEG_INFINITY; n],
            l: vec![0.0; n],
            o: vec![0.0; n * dv],
            scratch: vec![0.0; tile_scratch_len(n, TILE_KEYS, dk, dv)],
        }
    }

    /// Attends over a tile; `first_row`: its keys are rows of the pass from there on, and a token
    /// sees those up to its own.
    fn attend(&mut self, keys: &[f32], values: &[f32], first_row: Option<usize>) {
        let n = keys.len() / self.dk;
        for (i, visible) in self.visible.iter_mut().enumerate() {
            let row = self.rows[i / self.group];
            *visible = match first_row {
                Some(first) => (row + 1).saturating_sub(first).min(n) as u32,
                None => n as u32,
            };
        }
        let m = self.m.len();
        tile_attend(
            m,
            n,
            self.dk,
            self.dv,
            &self.q,
            keys,
            values,
            &self.visible,
            &mut self.m,
            &mut self.l,
            &mut self.o,
            &mut self.scratch,
        );
    }

    fn finish(mut self) -> Vec<f32> {
        for (o, &l) in self.o.chunks_mut(self.dv).zip(&self.l) {
            let scale = if l > 0.0 { l.recip() } else { 0.0 };
            o.iter_mut().for_each(|x| *x *= scale);
        }
        self.o
    }
}
