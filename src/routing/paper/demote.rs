//! A fast tier that is too small: anchors fall back into the spans around them.
//!
//! The reference raises where anchors and whole spans alone exceed the budget. Here the anchors of
//! lowest surprisal are demoted, as many as it takes: the tokens between the anchors that are left
//! become one span (or even pieces of at most l_max), sealed anew from what is kept of them.

use super::run::runs;
use super::{PaperTokens, Placed, Run};
use crate::error::Result;
use crate::kernels::RowCodec;
use crate::pool::Team;
use crate::routing::{OpenRows, RowBytes, SealedTokens, copy_row};
use crate::segment::divide;
use crate::span::Span;

/// Anchors in the order in which they are demoted: lowest surprisal first, later tokens first among
/// equals. The first token of a sequence without sinks is never among them: it is the sink.
fn order(tokens: &PaperTokens) -> Vec<u32> {
    let is_sink = |anchor: u32| anchor == 0 && tokens.params.n_sinks == 0;
    let mut order: Vec<u32> = tokens.anchors.iter().copied().filter(|&a| !is_sink(a)).collect();
    let surprisal = |anchor: u32| tokens.surprisal[anchor as usize];
    order.sort_by(|&a, &b| surprisal(a).total_cmp(&surprisal(b)).then(b.cmp(&a)));
    order
}

/// The anchors that are left when `n_demoted` of them have been demoted, ascending.
fn anchors_without(tokens: &PaperTokens, n_demoted: usize) -> Vec<u32> {
    let mut gone = order(tokens);
    gone.truncate(n_demoted);
    gone.sort_unstable();
    tokens.anchors.iter().copied().filter(|a| gone.binary_search(a).is_err()).collect()
}

/// How the sealed tokens are cut when `n_demoted` anchors have been demoted.
pub fn runs_without(tokens: &PaperTokens, n_demoted: usize) -> Vec<Run> {
    let left = anchors_without(tokens, n_demoted);
    let n_tokens = tokens.n_tokens();
    let rule = tokens.rule();
    let mut old = tokens.spans().peekable();
    let mut spans: Vec<Span> = Vec::new();
    let mut start = 0;
    let ends = left.iter().map(|&anchor| anchor as usize).chain([n_tokens]);
    for end in ends {
        let mut kept = Vec::new();
        while let Some(span) = old.next_if(|span| span.end <= end) {
            kept.push(span);
        }
        let first = tokens.anchors.partition_point(|&a| (a as usize) < start);
        let holds_demoted = tokens.anchors.get(first).is_some_and(|&a| (a as usize) < end);
        if holds_demoted {
            kept.clear();
            divide(start, end, &rule, &mut kept);
            kept.retain(|span| !span.full_resolution);
        }
        spans.extend(kept);
        start = end + 1;
    }
    runs(0, n_tokens, &spans)
}

/// Demotes the fewest anchors that free `excess` bytes of the fast tier, or all; returns what was
/// freed. On an error nothing has changed.
pub fn shrink(tokens: &mut PaperTokens, team: &Team, excess: u64) -> Result<u64> {
    let before = tokens.bytes_held().fast();
    let lists = tokens.token_metadata();
    let freed =
        |n: usize| before.saturating_sub(lists + tokens.fast_bytes_of(&runs_without(tokens, n)));
    let (mut low, mut high) = (0, order(tokens).len());
    // What is freed grows with the anchors that are demoted, so the least number that will do can
    // be searched for by halves.
    while low < high {
        let middle = (low + high) / 2;
        if freed(middle) >= excess {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    let anchors = anchors_without(tokens, low);
    replace(tokens, team, runs_without(tokens, low))?;
    tokens.demoted += (tokens.anchors.len() - anchors.len()) as u64;
    tokens.anchors = anchors;
    Ok(before.saturating_sub(tokens.bytes_held().fast()))
}

/// Seals anew the runs that are not as they were.
fn replace(tokens: &mut PaperTokens, team: &Team, wanted: Vec<Run>) -> Result<()> {
    let old_index = |run: &Run| {
        let index = tokens.runs.partition_point(|old| old.first < run.first);
        tokens.runs.get(index).filter(|&old| old == run).map(|_| index)
    };
    let kept: Vec<Option<usize>> = wanted.iter().map(old_index).collect();
    let changed = wanted.iter().zip(&kept).filter(|(_, kept)| kept.is_none());
    let changed: Vec<Run> = changed.map(|(run, _)| *run).collect();
    let surprisal = |token: usize| tokens.surprisal[token];
    let made = tokens.make_pieces(team, &SealedRows(tokens), 0, &changed, surprisal)?;
    let n_layers = tokens.layers.len();
    let mut layers: Vec<Vec<Placed>> = Vec::new();
    for layer in 0..n_layers {
        let mut new = made.iter().skip(layer).step_by(n_layers);
        let old = &tokens.layers[layer];
        let pieces = kept.iter().map(|kept| match kept {
            Some(index) => Some(old[*index].clone()),
            None => new.next().cloned(),
        });
        layers.push(pieces.flatten().collect());
    }
    tokens.layers = layers;
    tokens.runs = wanted;
    Ok(())
}

/// Sealed tokens, read back so that they can be sealed again.
struct SealedRows<'a>(&'a PaperTokens);

impl OpenRows for SealedRows<'_> {
    fn read(&self, layer: usize, head: usize, token: usize, key: &mut [f32], value: &mut [f32]) {
        self.0.read(layer, head, token, 1, key, value);
    }

    fn copy_encoded(
        &self,
        codec: RowCodec,
        layer: usize,
        head: usize,
        token: usize,
        out: RowBytes,
    ) -> bool {
        let is_same = codec == self.0.params.resident_codec;
        let row = is_same.then(|| self.0.whole_row(layer, head, token)).flatten();
        row.map(|row| copy_row(row, out)).is_some()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::model::{Model, ModelParams};
    use crate::params::{Params, RoutingKind};
    use crate::routing::{Counted, RecentQueries};
    use crate::store::SlowStore;

    /// Every token's key and value are its number.
    struct Numbered;

    impl OpenRows for Numbered {
        fn read(&self, _: usize, _: usize, token: usize, key: &mut [f32], value: &mut [f32]) {
            key.fill(token as f32);
            value.fill(token as f32);
        }
    }

    struct NoQueries;

    impl RecentQueries for NoQueries {
        fn count(&self) -> usize {
            0
        }

        fn token(&self, _: usize) -> usize {
            0
        }

        fn query(&self, _: usize, _: usize) -> &[f32] {
            &[]
        }
    }

    /// 100 tokens, sealed, with anchors at 0, 20, 40, 50 and 60; the spans 41..50 and 51..60 are
    /// too short to compress.
    fn sealed(n_sinks: usize) -> PaperTokens {
        let params = Params {
            routing: RoutingKind::Paper,
            n_sinks,
            resident_codec: RowCodec::F32,
            span_min: 16,
            ..Params::default()
        };
        let model = Model::from_params(&ModelParams {
            n_layer: 2,
            n_head: 2,
            n_head_kv: 1,
            head_dim_k: 8,
            head_dim_v: 8,
            ..ModelParams::default()
        });
        let (model, params) = (Arc::new(model.unwrap()), Arc::new(params));
        let mut tokens = PaperTokens::new(&model, &params, &SlowStore::default());
        let mut surprisal = vec![0.5; n_sinks + 100];
        for (token, value) in [(0, 9.0), (20, 5.0), (40, 3.0), (50, 4.0), (60, 3.0)] {
            surprisal[n_sinks + token] = value;
        }
        let team = Team::SERIAL;
        tokens.lay_out(&team, &Numbered, 100, &NoQueries).unwrap();
        tokens.seal(&team, &Numbered, n_sinks, 100, &surprisal).unwrap();
        assert_eq!(tokens.anchors, [0, 20, 40, 50, 60]);
        tokens
    }

    fn lengths(runs: &[Run]) -> Vec<(usize, usize)> {
        runs.iter().map(|run| (run.n_whole, run.n_span)).collect()
    }

    #[test]
    fn the_least_surprising_anchors_fall_first_into_the_span_around_them() {
        let tokens = sealed(0);
        assert_eq!(lengths(&tokens.runs), [(1, 19), (1, 19), (21, 39)]);
        assert_eq!(runs_without(&tokens, 0), tokens.runs);
        // 60 before 40: the earlier of equals stays longer.
        assert_eq!(lengths(&runs_without(&tokens, 1)), [(1, 19), (1, 19), (11, 49)]);
        assert_eq!(lengths(&runs_without(&tokens, 2)), [(1, 19), (1, 29), (1, 49)]);
        assert_eq!(lengths(&runs_without(&tokens, 3)), [(1, 19), (1, 79)]);
        assert_eq!(lengths(&runs_without(&tokens, 4)), [(1, 99)]);
    }

    #[test]
    fn the_first_token_is_demoted_only_behind_sinks() {
        assert_eq!(lengths(&runs_without(&sealed(0), 5)), [(1, 99)]);
        assert_eq!(lengths(&runs_without(&sealed(4), 5)), [(0, 100)]);
    }

    #[test]
    fn shrinking_frees_what_was_asked_for_and_keeps_every_token() {
        let mut tokens = sealed(0);
        let before = tokens.bytes_held().fast();
        let freed = shrink(&mut tokens, &Team::SERIAL, 1).unwrap();
        assert_eq!((tokens.demoted, freed), (1, before - tokens.bytes_held().fast()));
        let freed = shrink(&mut tokens, &Team::SERIAL, u64::MAX).unwrap();
        let least = tokens.minimum_bytes(&mut Counted::default());
        assert!(freed > 0 && tokens.bytes_held().fast() == least);
        assert_eq!((tokens.demoted, tokens.anchors.as_slice()), (4, &[0][..]));
        assert_eq!(shrink(&mut tokens, &Team::SERIAL, 1).unwrap(), 0);
        let (mut keys, mut values) = (vec![0.0; 800], vec![0.0; 800]);
        tokens.read(1, 0, 0, 100, &mut keys, &mut values);
        for (token, key) in keys.chunks(8).enumerate() {
            assert!((key[3] - token as f32).abs() < 1.0, "{token}: {key:?}");
        }
    }

    #[test]
    fn a_cut_ends_between_two_runs() {
        let mut tokens = sealed(0);
        let cuts = [0, 19, 20, 39, 40, 99, 100, 200].map(|n| tokens.cut_below(n));
        assert_eq!(cuts, [0, 0, 20, 20, 40, 40, 100, 100]);
        tokens.truncate(40);
        assert_eq!((tokens.n_tokens(), tokens.anchors.as_slice()), (40, &[0, 20][..]));
        assert_eq!((tokens.surprisal.len(), tokens.layers[1].len()), (40, 2));
    }
}
