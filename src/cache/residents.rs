//! Tokens that a sequence keeps whole: its sinks and its window.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use crate::error::Result;
use crate::kernels::RowCodec;
use crate::model::{Geometry, Rotation};
use crate::pool::Team;
use crate::routing::{OpenRows, RowBytes, SealedTokens, copy_row};
use crate::store::{Image, ImageReader};

/// Rows below which one thread is faster than several.
const ROWS_WORTH_SHARING: usize = 1024;

/// One KV head's rows.
#[derive(Default)]
struct Table {
    layer: usize,
    head: usize,
    keys: Vec<u8>,
    values: Vec<u8>,
}

/// Rows of every layer and KV head, in token order, in one codec.
///
/// Until a sequence has its layout, rows are raw f32: a codec that rounds wants centred keys, and
/// a sequence that short is small.
pub struct Residents {
    codec: RowCodec,
    n_rows: usize,
    /// Layer by layer, KV head by KV head.
    tables: Vec<Table>,
    /// A layer's first table.
    first: Vec<usize>,
    key_bytes: usize,
    value_bytes: usize,
    /// How far each row has moved since it was stored; empty where none has.
    turns: Vec<Option<Arc<Rotation>>>,
}

impl Residents {
    pub fn new(geometry: &Geometry, codec: RowCodec) -> Self {
        let mut first = Vec::with_capacity(geometry.layers.len());
        let mut tables = Vec::new();
        for (layer, shape) in geometry.layers.iter().enumerate() {
            first.push(tables.len());
            tables.extend((0..shape.n_kv_heads).map(|head| Table {
                layer,
                head,
                ..Table::default()
            }));
        }
        Self {
            codec,
            n_rows: 0,
            tables,
            first,
            key_bytes: codec.row_bytes(geometry.key_dim),
            value_bytes: codec.row_bytes(geometry.value_dim),
            turns: Vec::new(),
        }
    }

    /// A copy with room for `n_rows` rows in all.
    pub fn copy(&self, n_rows: usize) -> Result<Self> {
        let empty =
            |table: &Table| Table { layer: table.layer, head: table.head, ..Table::default() };
        let mut copy = Self {
            tables: self.tables.iter().map(empty).collect(),
            first: self.first.clone(),
            turns: self.turns.clone(),
            ..*self
        };
        copy.reserve_exactly(n_rows)?;
        for (to, from) in copy.tables.iter_mut().zip(&self.tables) {
            to.keys.extend_from_slice(&from.keys);
            to.values.extend_from_slice(&from.values);
        }
        Ok(copy)
    }

    pub fn codec(&self) -> RowCodec {
        self.codec
    }

    pub fn n_rows(&self) -> usize {
        self.n_rows
    }

    pub fn key(&self, layer: usize, head: usize, row: usize) -> &[u8] {
        &self.tables[self.first[layer] + head].keys[row * self.key_bytes..][..self.key_bytes]
    }

    pub fn value(&self, layer: usize, head: usize, row: usize) -> &[u8] {
        &self.tables[self.first[layer] + head].values[row * self.value_bytes..][..self.value_bytes]
    }

    /// Whether any row has moved since it was stored.
    pub fn is_turned(&self) -> bool {
        !self.turns.is_empty()
    }

    /// How far a row has moved since it was stored.
    pub fn turn(&self, row: usize) -> Option<&Rotation> {
        self.turns.get(row)?.as_deref()
    }

    /// Moves rows by `delta` positions.
    pub fn shift(&mut self, geometry: &Geometry, rows: Range<usize>, delta: i32) {
        self.turns.resize(self.n_rows, None);
        let mut made: HashMap<i32, Option<Arc<Rotation>>> = HashMap::new();
        for turn in &mut self.turns[rows] {
            let shift = turn.as_ref().map_or(0, |turn| turn.shift) + delta;
            let new = || (shift != 0).then(|| Arc::new(Rotation::new(geometry, shift)));
            *turn = made.entry(shift).or_insert_with(new).clone();
        }
        if self.turns.iter().all(Option::is_none) {
            self.turns = Vec::new();
        }
    }

    /// Bytes of how far each row has moved.
    pub fn turn_bytes(&self) -> u64 {
        (self.turns.capacity() * size_of::<Option<Arc<Rotation>>>()) as u64
    }

    /// Bytes held, unused capacity included.
    pub fn bytes(&self) -> u64 {
        let table = |t: &Table| (t.keys.capacity() + t.values.capacity()) as u64;
        self.tables.iter().map(table).sum()
    }

    /// Bytes of one token, all layers.
    pub fn bytes_a_token(geometry: &Geometry, codec: RowCodec) -> u64 {
        let row = codec.row_bytes(geometry.key_dim) + codec.row_bytes(geometry.value_dim);
        geometry.layers.iter().map(|layer| (layer.n_kv_heads * row) as u64).sum()
    }

    /// Makes room for `n_rows` rows in all and no more.
    pub fn reserve_exactly(&mut self, n_rows: usize) -> Result<()> {
        for table in &mut self.tables {
            for (rows, bytes) in
                [(&mut table.keys, self.key_bytes), (&mut table.values, self.value_bytes)]
            {
                let want = n_rows * bytes;
                if rows.capacity() > want {
                    rows.shrink_to(want);
                }
                rows.try_reserve_exact(want.saturating_sub(rows.len()))?;
            }
        }
        Ok(())
    }

    /// Appends tokens `first..first + n` of `source`, copying what is stored in this codec already.
    /// The room was reserved.
    pub fn append(
        &mut self,
        team: &Team,
        geometry: &Geometry,
        source: &dyn OpenRows,
        first: usize,
        n: usize,
    ) {
        let (codec, key_bytes, value_bytes) = (self.codec, self.key_bytes, self.value_bytes);
        let serial = Team::SERIAL;
        let team = if n * self.tables.len() < ROWS_WORTH_SHARING { &serial } else { team };
        team.for_each_mut(&mut self.tables, |_, table| {
            let mut row = [vec![0.0; geometry.key_dim], vec![0.0; geometry.value_dim]];
            let [key, value] = &mut row;
            for token in first..first + n {
                let (k, v) = (table.keys.len(), table.values.len());
                table.keys.resize(k + key_bytes, 0);
                table.values.resize(v + value_bytes, 0);
                let out = (&mut table.keys[k..], &mut table.values[v..]);
                if source.copy_encoded(codec, table.layer, table.head, token, out) {
                    continue;
                }
                source.read(table.layer, table.head, token, key, value);
                codec.encode(key, &mut table.keys[k..]);
                codec.encode(value, &mut table.values[v..]);
            }
        });
        self.n_rows += n;
        if self.is_turned() {
            self.turns.resize(self.n_rows, None);
        }
    }

    pub fn save(&self, image: &mut Image) {
        let mut rows = Vec::with_capacity(self.tables.len() * self.n_rows * self.key_bytes);
        for table in &self.tables {
            rows.extend_from_slice(&table.keys);
            rows.extend_from_slice(&table.values);
        }
        image.blob(rows);
        image.flag(self.is_turned());
        for turn in &self.turns {
            image.i32(turn.as_ref().map_or(0, |turn| turn.shift));
        }
    }

    /// Fills residents that are empty with `n_rows` rows that were saved.
    pub fn restore(
        &mut self,
        geometry: &Geometry,
        n_rows: usize,
        n_reserved: usize,
        image: &mut ImageReader,
    ) -> Result<()> {
        let (keys, values) = (n_rows * self.key_bytes, n_rows * self.value_bytes);
        let rows = image.blob("resident rows", self.tables.len() * (keys + values))?;
        self.reserve_exactly(n_reserved)?;
        // No head has rows of no bytes.
        for (table, rows) in self.tables.iter_mut().zip(rows.chunks_exact((keys + values).max(1))) {
            table.keys.extend_from_slice(&rows[..keys]);
            table.values.extend_from_slice(&rows[keys..]);
        }
        self.n_rows = n_rows;
        if image.flag()? {
            self.turns.try_reserve_exact(n_rows)?;
            let mut made: HashMap<i32, Arc<Rotation>> = HashMap::new();
            for _ in 0..n_rows {
                let shift = image.i32()?;
                let new = || Arc::new(Rotation::new(geometry, shift));
                let turn = (shift != 0).then(|| Arc::clone(made.entry(shift).or_insert_with(new)));
                self.turns.push(turn);
            }
        }
        Ok(())
    }

    /// Removes rows `first..first + n`.
    pub fn remove(&mut self, first: usize, n: usize) {
        for table in &mut self.tables {
            table.keys.drain(first * self.key_bytes..(first + n) * self.key_bytes);
            table.values.drain(first * self.value_bytes..(first + n) * self.value_bytes);
        }
        self.n_rows -= n;
        if self.is_turned() {
            self.turns.drain(first..first + n);
        }
    }
}

/// Centres of every layer and KV head, `[layer][KV head][key_dim]`.
pub type Centres = Vec<Vec<Vec<f32>>>;

/// What stored keys have to do with the centres.
pub enum Stored {
    /// There are no centres.
    Whole,
    /// Rows were stored whole, and are read less these.
    BeforeCentres(Centres),
    /// Rows were stored less these; they matter for rows that have moved.
    LessCentres(Centres),
}

/// The residents as tokens of their sequence: sinks first, then, after the sealed tokens, the
/// window, then what a pass has staged.
pub struct OpenTokens<'a> {
    pub residents: &'a Residents,
    /// Sinks, at rows 0..n_sinks.
    pub n_sinks: usize,
    pub n_sealed: usize,
    pub stored: Stored,
    /// Rows of the pass that is being committed.
    pub staged: Option<&'a super::pass::Staged>,
}

impl OpenTokens<'_> {
    fn row(&self, token: usize) -> usize {
        if token < self.n_sinks { token } else { token - self.n_sealed }
    }

    /// How residents that were stored with a layout stand to it: its centres, where they matter.
    pub fn stored_with(
        residents: &Residents,
        geometry: &Geometry,
        sealed: &dyn SealedTokens,
    ) -> Stored {
        match residents.is_turned() {
            true => Stored::LessCentres(Self::centres(geometry, sealed)),
            false => Stored::Whole,
        }
    }

    /// The centres of a layout, copied.
    pub fn centres(geometry: &Geometry, sealed: &dyn SealedTokens) -> Centres {
        let of = |il: usize, head: usize| sealed.centre(il, head).unwrap_or(&[]).to_vec();
        let layers = geometry.layers.iter().enumerate();
        layers.map(|(il, layer)| (0..layer.n_kv_heads).map(|head| of(il, head)).collect()).collect()
    }
}

impl OpenRows for OpenTokens<'_> {
    fn read(&self, layer: usize, head: usize, token: usize, key: &mut [f32], value: &mut [f32]) {
        let row = self.row(token);
        if row >= self.residents.n_rows {
            if let Some(staged) = self.staged {
                let row = row - self.residents.n_rows;
                key.copy_from_slice(staged.key(layer, head, row));
                value.copy_from_slice(staged.value(layer, head, row));
            }
            return;
        }
        self.residents.codec.decode(self.residents.key(layer, head, row), key);
        self.residents.codec.decode(self.residents.value(layer, head, row), value);
        let turn = self.residents.turn(row);
        match &self.stored {
            Stored::Whole => turn.into_iter().for_each(|turn| turn.apply(key)),
            Stored::BeforeCentres(centres) => {
                turn.into_iter().for_each(|turn| turn.apply(key));
                key.iter_mut().zip(&centres[layer][head]).for_each(|(k, c)| *k -= c);
            }
            Stored::LessCentres(centres) => {
                turn.into_iter().for_each(|turn| turn.apply_centred(key, &centres[layer][head]));
            }
        }
    }

    fn copy_encoded(
        &self,
        codec: RowCodec,
        layer: usize,
        head: usize,
        token: usize,
        out: RowBytes,
    ) -> bool {
        let row = self.row(token);
        let as_stored =
            !matches!(self.stored, Stored::BeforeCentres(_)) && self.residents.turn(row).is_none();
        let stored = row < self.residents.n_rows && as_stored && codec == self.residents.codec;
        if stored {
            let residents = self.residents;
            copy_row((residents.key(layer, head, row), residents.value(layer, head, row)), out);
        }
        stored
    }
}
