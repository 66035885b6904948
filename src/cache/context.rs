//! A context: the public calls, in the order in which a pass makes them.

use std::sync::Arc;
use std::time::Instant;

use super::ahead::Sealer;
use super::attend::{ROUTED_QUERIES, RoutedScratch};
use super::budget;
use super::pass::{LayerStep, Pass, PassSequence};
use super::plans::Plans;
use super::sequence::{Committed, Sequence};
use super::statistics::Counters;
use crate::error::{Error, Result, fail};
use crate::kernels::first_outside;
use crate::model::Model;
use crate::params::{FastBudget, Params};
use crate::pool::{Pool, Team};
use crate::routing::{Counted, RouteLimits};
use crate::store::{BasisFolder, SlowStore};
use crate::tensor::View;

/// Largest magnitude that a key, value or query may have: the largest f16.
pub const LARGEST_VALUE: f32 = 65_504.0;

/// One token of a batch.
#[derive(Clone, Copy, Debug)]
pub struct BatchToken<'a> {
    pub position: i32,
    /// The sequences it belongs to; its query attends over the first.
    pub sequences: &'a [i32],
}

/// The KV cache of some sequences of one model.
pub struct Context {
    pub(super) model: Arc<Model>,
    pub(super) params: Arc<Params>,
    pub(super) pool: Pool,
    /// None where the calling thread is all there is.
    sealer: Option<Sealer>,
    pub(super) store: SlowStore,
    pub(super) sequences: Vec<Option<Sequence>>,
    pub(super) fast_budget: FastBudget,
    pub(super) limits: RouteLimits,
    pub(super) pass: Option<Pass>,
    pub(super) plans: Plans,
    pub(super) counters: Counters,
    pub(super) scratch: Scratch,
    events: Vec<Error>,
}

/// Buffers kept from call to call.
#[derive(Default)]
pub(super) struct Scratch {
    /// `[token][n_heads][key_dim]` of the batch.
    pub(super) q: Vec<f32>,
    /// Of one sequence's attending tokens.
    pub(super) part_q: Vec<f32>,
    pub(super) part_out: Vec<f32>,
    pub(super) rows: Vec<usize>,
    pub(super) routed: RoutedScratch,
    /// One head's output.
    pub(super) row: Vec<f32>,
    spare_parts: Vec<PassSequence>,
}

impl Scratch {
    fn bytes(&self) -> u64 {
        ((self.q.capacity() + self.part_q.capacity() + self.part_out.capacity()) * 4) as u64
            + self.spare_parts.iter().map(|part| part.staged.bytes()).sum::<u64>()
    }
}

impl Context {
    pub fn new(model: Arc<Model>, params: Params) -> Result<Self> {
        params.validate(model.geometry.layers.len())?;
        let folder = params.basis_folder.as_deref();
        let folder =
            folder.map(|path| BasisFolder::open(path, params.basis_limit, params.basis_io));
        let store = SlowStore::new(folder.transpose()?);
        let pool = Pool::new(params.n_threads)?;
        let sealer = (pool.n_threads() > 1).then(Sealer::new).transpose()?;
        let mut sequences = Vec::new();
        sequences.try_reserve_exact(params.n_seq_max)?;
        sequences.resize_with(params.n_seq_max, || None);
        Ok(Self {
            pool,
            sealer,
            store,
            sequences,
            fast_budget: params.fast_budget,
            limits: RouteLimits { fetch_budget: params.fetch_budget },
            pass: None,
            plans: Plans::default(),
            counters: Counters::default(),
            scratch: Scratch::default(),
            events: Vec::new(),
            model,
            params: Arc::new(params),
        })
    }

    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }

    pub fn params(&self) -> &Params {
        &self.params
    }

    /// What went wrong without failing a call, oldest first; taking them empties the list.
    pub fn take_events(&mut self) -> Vec<Error> {
        let mut events = std::mem::take(&mut self.events);
        events.extend(self.store.take_events());
        events
    }

    pub fn set_fast_budget(&mut self, budget: FastBudget) {
        self.fast_budget = budget;
    }

    pub fn set_fetch_budget(&mut self, tokens: Option<usize>) {
        self.limits.fetch_budget = tokens;
    }

    /// The number of a sequence id.
    pub(super) fn sequence_index(&self, id: i32) -> Result<usize> {
        match usize::try_from(id).ok().filter(|&i| i < self.sequences.len()) {
            Some(index) => Ok(index),
            None => fail!(Sequence, "sequence {id} is outside 0 to {}", self.sequences.len() - 1),
        }
    }

    /// Begins a pass. Everything is checked before anything changes.
    pub fn begin(&mut self, batch: &[BatchToken]) -> Result<()> {
        if self.pass.is_some() {
            fail!(Order, "a pass is running, commit or abort it before the next begins");
        }
        if batch.is_empty() || batch.len() > self.params.n_batch_max {
            fail!(
                Argument,
                "the batch has {} tokens, expected 1 to n_batch_max = {}",
                batch.len(),
                self.params.n_batch_max
            );
        }
        let members = self.members(batch)?;
        let new_tokens: Vec<(usize, usize)> =
            members.iter().map(|(sequence, tokens)| (*sequence, tokens.len())).collect();
        budget::fit(self, &new_tokens)?;
        self.start_pass(batch, members);
        Ok(())
    }

    /// Which tokens each sequence gets, in batch order; refuses ids and positions that don't fit.
    fn members(&self, batch: &[BatchToken]) -> Result<Vec<(usize, Vec<usize>)>> {
        let mut members: Vec<(usize, Vec<usize>)> = Vec::new();
        let mut slot = vec![usize::MAX; self.sequences.len()];
        for (i, token) in batch.iter().enumerate() {
            if token.position < 0 {
                fail!(Position, "token {i} has position {}, expected 0 or more", token.position);
            }
            if token.sequences.is_empty() {
                fail!(Sequence, "token {i} belongs to no sequence");
            }
            for &id in token.sequences {
                let index = self.sequence_index(id)?;
                if slot[index] == usize::MAX {
                    slot[index] = members.len();
                    members.push((index, Vec::new()));
                }
                let tokens = &mut members[slot[index]].1;
                let last = match tokens.last() {
                    Some(&earlier) if earlier == i => {
                        fail!(Sequence, "token {i} names sequence {id} twice")
                    }
                    Some(&earlier) => Some(batch[earlier].position),
                    None => self.sequences[index].as_ref().and_then(Sequence::last_position),
                };
                if let Some(last) = last
                    && token.position <= last
                {
                    fail!(
                        Position,
                        "token {i} has position {} in sequence {id}, expected more than {last}",
                        token.position
                    );
                }
                tokens.push(i);
            }
        }
        Ok(members)
    }

    fn start_pass(&mut self, batch: &[BatchToken], members: Vec<(usize, Vec<usize>)>) {
        let geometry = &self.model.geometry;
        let mut pass = Pass {
            n_tokens: batch.len(),
            positions: batch.iter().map(|token| token.position).collect(),
            parts: Vec::with_capacity(members.len()),
            steps: vec![LayerStep::Waiting; geometry.layers.len()],
        };
        for (sequence, tokens) in members {
            let mut part = self.scratch.spare_parts.pop().unwrap_or_default();
            part.sequence = sequence;
            part.staged.reset(geometry, tokens.len());
            let names_first = |&i: &usize| batch[tokens[i]].sequences[0] as usize == sequence;
            part.attending.clear();
            part.attending.extend((0..tokens.len()).filter(names_first));
            part.tokens = tokens;
            pass.parts.push(part);
        }
        let started = Instant::now();
        let mut sealed = 0;
        for part in &pass.parts {
            let is_prompt = part.tokens.len() > ROUTED_QUERIES;
            let (model, params, store) = (&self.model, &self.params, &self.store);
            let sequence = self.sequences[part.sequence]
                .get_or_insert_with(|| Sequence::new(model, params, store));
            let done = self.pool.team(|team| sequence.before_pass(team, is_prompt));
            sealed += done.sealed_tokens;
            note_seal(&mut self.counters, &mut self.events, done);
        }
        if sealed > 0 {
            self.counters.seal.add(started.elapsed());
        }
        self.pass = Some(pass);
    }

    /// Tokens of the running pass.
    pub fn pass_tokens(&self) -> Option<usize> {
        self.pass.as_ref().map(|pass| pass.n_tokens)
    }

    /// A layer's keys and values of the pass.
    pub fn ingest(&mut self, layer: usize, k: &View, v: &View) -> Result<()> {
        let Some(pass) = &mut self.pass else {
            fail!(Order, "no pass is running, begin one before prefill_ingest");
        };
        let geometry = &self.model.geometry;
        let Some(shape) = geometry.layers.get(layer) else {
            fail!(
                Argument,
                "layer {layer} does not exist, the model has {}",
                geometry.layers.len()
            );
        };
        if pass.steps[layer] != LayerStep::Waiting {
            fail!(Order, "layer {layer} was ingested already in this pass");
        }
        if let Some(earlier) = pass.steps[..layer].iter().position(|&s| s == LayerStep::Waiting) {
            fail!(Order, "layer {layer} comes before layer {earlier} was ingested");
        }
        k.check("k", geometry.key_dim, shape.n_kv_heads, pass.n_tokens)?;
        v.check("v", geometry.value_dim, shape.n_kv_heads, pass.n_tokens)?;
        for part in &mut pass.parts {
            let sealed = self.sequences[part.sequence].as_ref().map(|s| &s.sealed);
            let n_rows = part.staged.n_rows();
            let (keys, values) = part.staged.layer_mut(layer, shape.n_kv_heads);
            for head in 0..shape.n_kv_heads {
                let centre = sealed.and_then(|sealed| sealed.centre(layer, head));
                let first = head * n_rows;
                for (row, &token) in part.tokens.iter().enumerate() {
                    let key = &mut keys[(first + row) * geometry.key_dim..][..geometry.key_dim];
                    k.load(head, token, key);
                    check_values("K", layer, head, token, key)?;
                    for (x, c) in key.iter_mut().zip(centre.unwrap_or(&[])) {
                        *x -= c;
                    }
                    let value =
                        &mut values[(first + row) * geometry.value_dim..][..geometry.value_dim];
                    v.load(head, token, value);
                    check_values("V", layer, head, token, value)?;
                }
            }
        }
        pass.steps[layer] = LayerStep::Ingested;
        Ok(())
    }

    /// Ends the pass: its tokens count. `surprisal[i]` is token i's, in nats, NaN where unknown.
    pub fn commit(&mut self, surprisal: Option<&[f32]>) -> Result<()> {
        let Some(pass) = &self.pass else {
            fail!(Order, "no pass is running, there is nothing to commit");
        };
        if let Some(layer) = pass.steps.iter().position(|&step| step == LayerStep::Waiting) {
            fail!(Order, "layer {layer} was not ingested, a pass needs every layer");
        }
        if let Some(values) = surprisal {
            if values.len() != pass.n_tokens {
                fail!(
                    Argument,
                    "{} surprisals were given, the batch has {} tokens",
                    values.len(),
                    pass.n_tokens
                );
            }
            check_surprisal(values)?;
        }
        for part in &pass.parts {
            if let Some(sequence) = &mut self.sequences[part.sequence] {
                sequence.reserve(part.tokens.len())?;
            }
        }
        let Some(pass) = self.pass.take() else {
            fail!(Internal, "the pass vanished");
        };
        self.plans.clear();
        let started = Instant::now();
        let mut sealed = 0;
        for part in &pass.parts {
            let Some(sequence) = &mut self.sequences[part.sequence] else { continue };
            let is_prompt = part.tokens.len() > ROUTED_QUERIES;
            let tokens = part.tokens.iter().map(|&token| {
                (pass.positions[token], surprisal.map_or(f32::NAN, |values| values[token]))
            });
            let done =
                self.pool.team(|team| sequence.commit(team, &part.staged, tokens, is_prompt));
            sealed += done.sealed_tokens;
            note_seal(&mut self.counters, &mut self.events, done);
            if let Some(sealer) = &self.sealer {
                sequence.seal_ahead(sealer);
            }
        }
        if sealed > 0 {
            self.counters.seal.add(started.elapsed());
        }
        self.counters.passes += 1;
        self.end_pass(pass);
        if let Err(error) = budget::keep(self) {
            self.events.push(error);
        }
        Ok(())
    }

    /// Ends the pass as if it had never begun.
    pub fn abort(&mut self) -> Result<()> {
        let Some(pass) = self.pass.take() else {
            fail!(Order, "no pass is running, there is nothing to abort");
        };
        self.plans.clear();
        for part in &pass.parts {
            let slot = &mut self.sequences[part.sequence];
            if let Some(sequence) = slot {
                let first = sequence.n_tokens();
                Arc::make_mut(&mut sequence.queries).settle(first, part.tokens.len(), false);
                if first == 0 {
                    *slot = None;
                }
            }
        }
        self.end_pass(pass);
        Ok(())
    }

    fn end_pass(&mut self, pass: Pass) {
        self.scratch.spare_parts.extend(pass.parts);
        self.counters.scratch_peak = self.counters.scratch_peak.max(self.scratch_bytes());
        // A prompt's staging is large and a decode step's small: keep what a step needs.
        if pass.n_tokens <= ROUTED_QUERIES {
            self.scratch.spare_parts.truncate(self.sequences.len());
        } else {
            self.scratch.spare_parts.clear();
            self.scratch.q = Vec::new();
            self.scratch.part_q = Vec::new();
            self.scratch.part_out = Vec::new();
        }
    }

    pub(super) fn scratch_bytes(&self) -> u64 {
        let mut counted = Counted::default();
        let rings = self.sequences.iter().flatten().map(|s| &s.queries);
        let rings = rings.filter(|queries| counted.is_new(queries));
        let plan = self.scratch.routed.plan.as_ref().map_or(0, |plan| plan.bytes());
        self.scratch.bytes() + plan + rings.map(|queries| queries.bytes()).sum::<u64>()
    }

    pub(super) fn require_no_pass(&self, call: &str) -> Result<()> {
        if self.pass.is_some() {
            fail!(Order, "{call} during a pass, commit or abort it first");
        }
        Ok(())
    }

    pub(super) fn with_team<R>(
        &mut self,
        work: impl FnOnce(&Team, &mut [Option<Sequence>]) -> R,
    ) -> R {
        let sequences = &mut self.sequences[..];
        self.pool.team(|team| work(team, sequences))
    }
}

fn note_seal(counters: &mut Counters, events: &mut Vec<Error>, done: Committed) {
    counters.sealed_ahead += u64::from(done.was_ahead);
    if let Some(error) = done.seal_error {
        counters.seal_failures += 1;
        events.push(error);
    }
}

pub(super) fn check_values(
    name: &str,
    layer: usize,
    head: usize,
    token: usize,
    row: &[f32],
) -> Result<()> {
    if let Some(i) = first_outside(row, LARGEST_VALUE) {
        fail!(
            Value,
            "{name} of layer {layer}, head {head}, token {token} holds {} at element {i}, expected \
             finite values of at most {LARGEST_VALUE}",
            row[i]
        );
    }
    Ok(())
}

/// NaN means unknown; infinite or negative surprisal is no surprisal.
pub(super) fn check_surprisal(values: &[f32]) -> Result<()> {
    if let Some(i) = values.iter().position(|&s| s < 0.0 || s.is_infinite()) {
        fail!(
            Value,
            "surprisal of token {i} is {}, expected a number of nats of at least 0, or NaN for \
             unknown",
            values[i]
        );
    }
    Ok(())
}
