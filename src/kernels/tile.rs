//! Exact attention of many queries over one tile of keys and values: two matrix products with an
//! online-softmax step between them, on the calling thread.
//!
//! Tiles of 192 to 512 query rows by 128 keys are the best: the products reach about 80 % of a
//! core's peak from 192 x 64 on, and the softmax step weighs less per product the larger d is.

use super::exp;
use gemm::{Parallelism, gemm};

/// f32 elements of scratch that [`tile_attend`] needs.
pub fn scratch_len(m: usize, n: usize, _dk: usize, _dv: usize) -> usize {
    m * n + 2 * m
}

/// One online-softmax step of `m` query rows against `n` keys.
///
/// q: `[m][dk]`, already multiplied by the attention scale; k: `[n][dk]`; v: `[n][dv]`. Row i sees
/// keys `j < visible[i]`. `state_m`, `state_l` (`[m]`) and `state_o` (`[m][dv]`) are each row's
/// running maximum, sum and unnormalised output; an empty state is (-inf, 0, 0), and a row that
/// sees nothing stays as it is.
#[allow(clippy::too_many_arguments)]
pub fn tile_attend(
    m: usize,
    n: usize,
    dk: usize,
    dv: usize,
    q: &[f32],
    k: &[f32],
    v: &[f32],
    visible: &[u32],
    state_m: &mut [f32],
    state_l: &mut [f32],
    state_o: &mut [f32],
    scratch: &mut [f32],
) {
    assert_eq!((q.len(), k.len(), v.len()), (m * dk, n * dk, n * dv));
    assert_eq!((visible.len(), state_m.len(), state_l.len()), (m, m, m));
    assert_eq!(state_o.len(), m * dv);
    assert!(scratch.len() >= scratch_len(m, n, dk, dv));
    if m == 0 || n == 0 || dv == 0 {
        return;
    }
    let (scores, scratch) = scratch.split_at_mut(m * n);
    let (kept, sums) = scratch[..2 * m].split_at_mut(m);
    // S = Q K^T.
    multiply(m, n, dk, scores, false, q, k, (1, dk));
    // P = exp(S - the row's new maximum), 0 where hidden.
    for (i, line) in scores.chunks_exact_mut(n).enumerate() {
        let (seen, hidden) = line.split_at_mut((visible[i] as usize).min(n));
        hidden.fill(0.0);
        let top = state_m[i].max(exp::max(seen));
        sums[i] = exp::exp_minus(seen, top);
        // What the old state keeps, as a logarithm: all of it for a row that has seen nothing yet.
        kept[i] = if top == state_m[i] { 0.0 } else { state_m[i] - top };
        state_m[i] = top;
    }
    exp::exp_minus(kept, 0.0);
    for (i, o) in state_o.chunks_exact_mut(dv).enumerate() {
        state_l[i] = state_l[i] * kept[i] + sums[i];
        if kept[i] != 1.0 {
            o.iter_mut().for_each(|o| *o *= kept[i]);
        }
    }
    // O += P V.
    multiply(m, dv, n, state_o, true, scores, v, (dv, 1));
}

/// `dst = [dst +] lhs rhs` for row-major dst `[m][n]` and lhs `[m][k]`; `strides` are those of
/// rhs from one row (of k) and one column (of n) to the next.
#[allow(clippy::too_many_arguments)]
fn multiply(
    m: usize,
    n: usize,
    k: usize,
    dst: &mut [f32],
    add: bool,
    lhs: &[f32],
    rhs: &[f32],
    strides: (usize, usize),
) {
    assert_eq!((dst.len(), lhs.len(), rhs.len()), (m * n, m * k, k * n));
    // SAFETY: the three matrices lie within their slices, by the lengths just checked and strides
    // that are (row, 1) or (1, row); dst is exclusive and overlaps neither operand.
    unsafe {
        gemm(
            m,
            n,
            k,
            dst.as_mut_ptr(),
            1,
            n as isize,
            add,
            lhs.as_ptr(),
            1,
            k as isize,
            rhs.as_ptr(),
            strides.1 as isize,
            strides.0 as isize,
            1.0,
            1.0,
            false,
            false,
            false,
            Parallelism::None,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::Random;
    use super::*;

    /// Runs the tiles `sizes` one after the other and compares with a dense softmax in f64.
    fn check(m: usize, sizes: &[usize], dk: usize, dv: usize, magnitude: f32, causal: bool) {
        let mut random = Random::new((m * dk + sizes.len()) as u64);
        let total: usize = sizes.iter().sum();
        let q: Vec<f32> = random.values(m * dk).iter().map(|q| q * magnitude).collect();
        let (k, v) = (random.values(total * dk), random.values(total * dv));
        let sees = |i: usize| if causal { (i * total).div_ceil(m) } else { total };
        let mut state_m = vec![f32::NEG_INFINITY; m];
        let mut state_l = vec![0.0; m];
        let mut state_o = vec![0.0; m * dv];
        let mut first = 0;
        for &n in sizes {
            let visible: Vec<u32> = (0..m).map(|i| sees(i).saturating_sub(first) as u32).collect();
            let mut scratch = vec![f32::NAN; scratch_len(m, n, dk, dv)];
            tile_attend(
                m,
                n,
                dk,
                dv,
                &q,
                &k[first * dk..][..n * dk],
                &v[first * dv..][..n * dv],
                &visible,
                &mut state_m,
                &mut state_l,
                &mut state_o,
                &mut scratch,
            );
            first += n;
        }
        for i in 0..m {
            let scores: Vec<f64> = (0..sees(i))
                .map(|j| (0..dk).map(|c| f64::from(q[i * dk + c]) * f64::from(k[j * dk + c])).sum())
                .collect();
            if scores.is_empty() {
                assert_eq!((state_m[i], state_l[i]), (f32::NEG_INFINITY, 0.0));
                assert!(state_o[i * dv..][..dv].iter().all(|o| *o == 0.0));
                continue;
            }
            let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|score| (score - top).exp()).collect();
            let sum: f64 = weights.iter().sum();
            for c in 0..dv {
                let right: f64 =
                    weights.iter().zip(v.chunks(dv)).map(|(w, v)| w * f64::from(v[c])).sum();
                let found = f64::from(state_o[i * dv + c]) / f64::from(state_l[i]);
                // f32 scores carry 2^-24 of the largest product, which the exponential keeps.
                let bound = 2e-5 + 1e-6 * f64::from(magnitude) * dk as f64;
                assert!((found - right / sum).abs() < bound, "{found} {}", right / sum);
            }
        }
    }

    #[test]
    fn tiles_merge_to_the_dense_softmax() {
        check(1, &[1], 64, 64, 1.0, false);
        check(5, &[3, 17, 1], 72, 40, 1.0, false);
        check(33, &[64, 64, 30], 128, 128, 0.3, false);
        check(20, &[31, 64], 100, 100, 0.3, true);
        check(64, &[64, 128], 64, 64, 1.0, true);
    }

    #[test]
    fn scores_of_ten_thousand_do_not_overflow() {
        check(9, &[40, 9], 64, 64, 1_000.0, true);
    }

    #[test]
    fn a_row_that_sees_nothing_stays_as_it_is() {
        let mut state = ([3.0f32, f32::NEG_INFINITY], [2.0f32, 0.0], [5.0f32, -6.0]);
        let (q, k, v) = ([1.0, 2.0], [4.0, 5.0, 6.0], [1.0, 1.0, 1.0]);
        let mut scratch = vec![f32::NAN; scratch_len(2, 3, 1, 1)];
        let before = state;
        let (m, l, o) = (&mut state.0, &mut state.1, &mut state.2);
        tile_attend(2, 3, 1, 1, &q, &k, &v, &[0, 0], m, l, o, &mut scratch);
        assert_eq!(state, before);
    }
}
