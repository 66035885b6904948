use super::*;
use crate::kernels::RowCodec;

/// Rows of a fixed pattern, full rank in general position.
fn pattern(tokens: usize, dim: usize) -> Vec<f32> {
    let mut state = 12_345u32;
    (0..tokens * dim)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect()
}

fn rebuilt(basis: &Basis, codec: RowCodec, gates: &[f32]) -> Vec<f32> {
    let mut bytes = Vec::new();
    encode(basis, codec, &mut bytes);
    let shape = BasisShape::of(basis, codec);
    assert_eq!(bytes.len(), shape.bytes());
    let mut out = vec![f32::NAN; basis.tokens * basis.dim];
    rebuild(&shape, &bytes, gates, 0..basis.tokens, &mut out);
    let part = basis.tokens / 3..basis.tokens / 2;
    let mut rows = vec![f32::NAN; part.len() * basis.dim];
    rebuild(&shape, &bytes, gates, part.clone(), &mut rows);
    assert_eq!(rows, out[part.start * basis.dim..part.end * basis.dim]);
    out
}

/// Largest difference over the largest magnitude.
fn distance(found: &[f32], expected: &[f32]) -> f32 {
    let largest = expected.iter().fold(f32::MIN_POSITIVE, |m, x| m.max(x.abs()));
    found.iter().zip(expected).fold(0f32, |m, (a, b)| m.max((a - b).abs())) / largest
}

#[test]
fn full_rank_is_exact_on_either_side() {
    for (tokens, dim) in [(1, 1), (1, 8), (7, 8), (8, 8), (30, 8), (5, 64)] {
        let rows = pattern(tokens, dim);
        let basis = decompose(&rows, dim, 64).unwrap();
        assert_eq!(basis.rank, tokens.min(dim));
        assert!(basis.errors[basis.rank - 1] < 1e-6);
        let ones = vec![1.0; basis.rank];
        assert!(distance(&rebuilt(&basis, RowCodec::F32, &ones), &rows) < 2e-6);
        assert!(distance(&rebuilt(&basis, RowCodec::F16, &ones), &rows) < 2e-3);
        assert!(distance(&rebuilt(&basis, RowCodec::Int8, &ones), &rows) < 3e-2);
    }
}

#[test]
fn truncation_leaves_the_error_it_names() {
    for (tokens, dim) in [(40, 16), (16, 40)] {
        let rows = pattern(tokens, dim);
        let basis = decompose(&rows, dim, 5).unwrap();
        assert_eq!(basis.rank, 5);
        let found = rebuilt(&basis, RowCodec::F32, &[1.0; 5]);
        let norm = |x: &[f32]| x.iter().map(|a| f64::from(*a).powi(2)).sum::<f64>().sqrt();
        let rest: Vec<f32> = found.iter().zip(&rows).map(|(a, b)| a - b).collect();
        let error = norm(&rest) / norm(&rows);
        assert!((error - f64::from(basis.errors[4])).abs() < 1e-5, "{error} {:?}", basis.errors);
        assert!(basis.singular.windows(2).all(|pair| pair[0] >= pair[1]));
    }
}

#[test]
fn an_error_bound_ends_the_basis_early() {
    // Two directions, one ten times the other.
    let rows: Vec<f32> =
        (0..20).flat_map(|t| [10.0 * (t as f32).sin(), (t as f32 * 2.0).cos(), 0.0]).collect();
    let basis = decompose(&rows, 3, 3).unwrap();
    let ranks = [0.2, 0.01, 0.0].map(|bound| basis.rank_within(bound));
    assert_eq!(ranks, [1, 2, 3]);
    let mut short = basis.clone();
    short.truncate(2);
    assert_eq!((short.rank, short.singular.len(), short.errors.len()), (2, 2, 2));
    let gated = rebuilt(&basis, RowCodec::F32, &[1.0, 1.0, 0.0]);
    assert_eq!(rebuilt(&short, RowCodec::F32, &[1.0; 2]), gated);
}

#[test]
fn degenerate_spans_stay_finite() {
    for (tokens, dim) in [(6, 4), (4, 6)] {
        let zero = decompose(&vec![0.0; tokens * dim], dim, 3).unwrap();
        assert_eq!(zero.errors, [0.0; 3]);
        for codec in [RowCodec::F32, RowCodec::F16, RowCodec::Int8] {
            assert!(rebuilt(&zero, codec, &[1.0; 3]).iter().all(|&x| x == 0.0));
        }
        let same: Vec<f32> = (0..tokens).flat_map(|_| (0..dim).map(|i| i as f32 + 1.0)).collect();
        let basis = decompose(&same, dim, 3).unwrap();
        let ones = vec![1.0; basis.rank];
        assert!(distance(&rebuilt(&basis, RowCodec::F32, &ones), &same) < 1e-6);
        assert!(basis.singular[1] < 1e-5 * basis.singular[0]);
    }
}

#[test]
fn one_channel_ten_thousand_times_the_others_keeps_the_others() {
    let mut rows = pattern(12, 8);
    rows.iter_mut().step_by(8).for_each(|x| *x *= 1e4);
    let basis = decompose(&rows, 8, 8).unwrap();
    let found = rebuilt(&basis, RowCodec::F32, &[1.0; 8]);
    for (a, b) in found.iter().zip(&rows) {
        assert!((a - b).abs() < 2e-6 * b.abs().max(1.0) + 2e-3, "{a} {b}");
    }
}

#[test]
fn gates_weigh_directions() {
    let rows = pattern(10, 6);
    let basis = decompose(&rows, 6, 4).unwrap();
    let half = rebuilt(&basis, RowCodec::F32, &[0.5; 4]);
    let whole = rebuilt(&basis, RowCodec::F32, &[1.0; 4]);
    let doubled: Vec<f32> = half.iter().map(|x| 2.0 * x).collect();
    assert_eq!(doubled, whole);
    assert!(rebuilt(&basis, RowCodec::F32, &[0.0; 4]).iter().all(|&x| x == 0.0));
}

#[test]
fn only_whole_rows_have_a_basis() {
    assert!(decompose(&[], 6, 2).is_err());
    assert!(decompose(&[1.0; 7], 6, 2).is_err());
    assert!(decompose(&[1.0; 12], 6, 0).is_err());
}

#[test]
fn bytes_tell_when_a_basis_pays() {
    let shape =
        |tokens| BasisShape { codec: RowCodec::Int8, tokens, dim: 128, rank: 32.min(tokens) };
    // Twice, for K and V. Short spans have full rank, and a basis of full rank is larger.
    assert!(2 * shape(16).bytes() > token_bytes(16, 128, 128));
    assert!(2 * shape(128).bytes() < token_bytes(128, 128, 128));
}
