//! Spans and surprisal that break KV caches, through the cache.

mod common;

use common::{Harness, Shape, sealed_params, view};
use sekv::cache::{BatchToken, Context};
use sekv::error::{Result, Status};
use sekv::params::{Params, RoutingKind};

const DIM: usize = 32;

fn params(routing: RoutingKind) -> Params {
    Params { routing, n_sinks: 1, window: 4, span_min: 4, ..sealed_params(8) }
}

/// Ingests tokens at the next positions and commits them with this surprisal.
fn replay(context: &mut Context, first: i32, n: usize, surprisal: Option<&[f32]>) -> Result<()> {
    let positions = first..first + n as i32;
    let tokens: Vec<BatchToken> =
        positions.map(|position| BatchToken { position, sequences: &[0] }).collect();
    context.begin(&tokens)?;
    let mut rows: Vec<f32> =
        (0..n * 2 * DIM).map(|i| ((i * 37 % 101) as f32 - 50.0) / 25.0).collect();
    let mut values = rows.clone();
    context.ingest(0, &view(&mut rows, DIM, 2, n), &view(&mut values, DIM, 2, n))?;
    let committed = context.commit(surprisal);
    if committed.is_err() {
        context.abort()?;
    }
    committed
}

fn fresh(routing: RoutingKind) -> Context {
    Context::new(Shape::uniform(1, 4, 2, DIM).model(), params(routing)).unwrap()
}

const BOTH: [RoutingKind; 2] = [RoutingKind::Ladder, RoutingKind::Paper];

#[test]
fn no_tokens_are_refused_and_one_is_enough() {
    for routing in BOTH {
        let mut harness = Harness::new(Shape::uniform(1, 4, 2, DIM), params(routing), 1);
        assert_eq!(harness.context.begin(&[]).unwrap_err().status, Status::Argument);
        assert!(harness.pass(1) < 2e-5);
        assert!(harness.pass(1) < 2e-5);
    }
}

#[test]
fn equal_and_zero_surprisal_seal_every_token_and_lose_none() {
    for routing in BOTH {
        for value in [0.0, 3.5] {
            let mut context = fresh(routing);
            replay(&mut context, 0, 300, Some(&[value; 300])).unwrap();
            let statistics = context.statistics();
            assert_eq!(statistics.n_tokens, 300);
            assert_eq!(statistics.n_sealed + statistics.n_resident, 300);
            assert!(statistics.n_sealed > 200, "{routing:?}: {}", statistics.n_sealed);
        }
    }
}

#[test]
fn impossible_surprisal_is_refused_by_token_and_changes_nothing() {
    for routing in BOTH {
        let mut context = fresh(routing);
        replay(&mut context, 0, 40, Some(&[1.0; 40])).unwrap();
        for bad in [-1.0, f32::INFINITY, f32::NEG_INFINITY] {
            let mut surprisal = [1.0; 20];
            surprisal[13] = bad;
            let error = replay(&mut context, 40, 20, Some(&surprisal)).unwrap_err();
            assert_eq!(error.status, Status::Value);
            assert!(error.message.contains("token 13"), "{}", error.message);
        }
        let error = replay(&mut context, 40, 20, Some(&[1.0; 19])).unwrap_err();
        assert_eq!(error.status, Status::Argument);
        assert!(error.message.contains("19") && error.message.contains("20"), "{}", error.message);
        assert_eq!(context.statistics().n_tokens, 40);
        replay(&mut context, 40, 20, Some(&[f32::NAN; 20])).unwrap();
        assert_eq!(context.statistics().n_tokens, 60);
    }
}

#[test]
fn surprisal_may_come_late_in_pieces_or_never() {
    for routing in BOTH {
        let mut context = fresh(routing);
        replay(&mut context, 0, 100, None).unwrap();
        context.set_surprisal(0, 0, &[1.0; 60]).unwrap();
        context.set_surprisal(0, 60, &[2.0; 40]).unwrap();
        let beyond = context.set_surprisal(0, 90, &[1.0; 11]).unwrap_err();
        assert_eq!(beyond.status, Status::Argument);
        let missing = context.set_surprisal(1, 0, &[1.0]).unwrap_err();
        assert_eq!(missing.status, Status::Sequence);
        replay(&mut context, 100, 100, None).unwrap();
        replay(&mut context, 200, 1, None).unwrap();
        assert_eq!(context.statistics().n_tokens, 201);
    }
}

/// An anchor every other token leaves no span of more than one: all of it stays whole.
#[test]
fn anchors_everywhere_leave_nothing_to_compress() {
    let params = Params { surprisal_alpha: 0.0, ..params(RoutingKind::Paper) };
    let mut context = Context::new(Shape::uniform(1, 4, 2, DIM).model(), params).unwrap();
    let surprisal: Vec<f32> = (0..200).map(|i| if i % 2 == 0 { 9.0 } else { 0.1 }).collect();
    replay(&mut context, 0, 200, Some(&surprisal)).unwrap();
    let statistics = context.statistics();
    assert_eq!((statistics.report.spans, statistics.n_tokens), (0, 200));
}

/// 131,072 tokens of equal surprisal are one span to the paper: they are cut to the limit.
#[test]
fn a_prompt_of_128k_that_is_one_span_is_held_by_both() {
    for routing in BOTH {
        let params = Params { block_tokens: 64, n_batch_max: 8192, ..params(routing) };
        let shape = Shape::uniform(1, 2, 2, DIM);
        let mut context = Context::new(shape.model(), params).unwrap();
        for first in (0..131_072).step_by(8192) {
            replay(&mut context, first, 8192, Some(&[2.0; 8192])).unwrap();
        }
        let statistics = context.statistics();
        assert_eq!(statistics.n_tokens, 131_072);
        assert!(statistics.n_sealed > 131_000, "{routing:?}: {}", statistics.n_sealed);
    }
}
