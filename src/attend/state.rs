//! The running state of a softmax over rows, for the query heads that share a KV head.

/// For each of `n_group` heads: the largest score `m`, the sum `l` of exp(score - m), and the sum
/// `o` of exp(score - m) * value (online softmax; Milakov and Gimelshein 2018, and the merge of
/// FlashAttention's split-K).
///
/// An empty state has m = -inf, l = 0, o = 0, and merging with one changes nothing: two empty
/// states give an empty one, never NaN.
#[derive(Clone, Debug, Default)]
pub struct SoftmaxState {
    /// `[n_group]`
    pub m: Vec<f32>,
    /// `[n_group]`
    pub l: Vec<f32>,
    /// `[n_group][value_dim]`
    pub o: Vec<f32>,
}

impl SoftmaxState {
    /// Makes the state empty, for `n_group` heads of `value_dim` dimensions, reusing its memory.
    pub fn reset(&mut self, n_group: usize, value_dim: usize) {
        self.m.clear();
        self.m.resize(n_group, f32::NEG_INFINITY);
        self.l.clear();
        self.l.resize(n_group, 0.0);
        self.o.clear();
        self.o.resize(n_group * value_dim, 0.0);
    }

    pub fn n_group(&self) -> usize {
        self.m.len()
    }

    pub fn value_dim(&self) -> usize {
        self.o.len() / self.m.len().max(1)
    }

    /// Brings head `g` to a maximum of at least `m`, and returns the factor that a term
    /// exp(score - m) takes to join.
    pub fn raise(&mut self, g: usize, m: f32) -> f32 {
        if m <= self.m[g] {
            // Also where both are -inf: a term of weight 0 joins an empty state.
            return if m == f32::NEG_INFINITY { 0.0 } else { (m - self.m[g]).exp() };
        }
        let shrink = if self.l[g] == 0.0 { 0.0 } else { (self.m[g] - m).exp() };
        self.m[g] = m;
        self.l[g] *= shrink;
        let dim = self.value_dim();
        for o in &mut self.o[g * dim..][..dim] {
            *o *= shrink;
        }
        1.0
    }

    /// Adds what another state has seen.
    pub fn merge(&mut self, other: &Self) {
        let dim = self.value_dim();
        for g in 0..self.n_group() {
            let factor = self.raise(g, other.m[g]);
            if factor == 0.0 {
                continue;
            }
            self.l[g] += factor * other.l[g];
            for (o, x) in self.o[g * dim..][..dim].iter_mut().zip(&other.o[g * dim..][..dim]) {
                *o += factor * x;
            }
        }
    }

    /// Head `g`'s log of the sum of exponentials; -inf when empty.
    pub fn log_sum(&self, g: usize) -> f32 {
        self.m[g] + self.l[g].ln()
    }

    /// Head `g`'s attention output; zero when no row was seen.
    pub fn finish(&self, g: usize, out: &mut [f32]) {
        let dim = self.value_dim();
        // The reciprocal of less than that is no number.
        let is_seen = self.l[g] >= f32::MIN_POSITIVE;
        let scale = if is_seen { self.l[g].recip() } else { 0.0 };
        for (out, o) in out.iter_mut().zip(&self.o[g * dim..][..dim]) {
            *out = o * scale;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(m: f32, value: f32) -> SoftmaxState {
        SoftmaxState { m: vec![m], l: vec![1.0], o: vec![value] }
    }

    fn empty() -> SoftmaxState {
        let mut state = SoftmaxState::default();
        state.reset(1, 1);
        state
    }

    #[test]
    fn an_empty_state_is_the_identity() {
        let mut both = empty();
        both.merge(&empty());
        assert_eq!((both.m[0], both.l[0], both.o[0]), (f32::NEG_INFINITY, 0.0, 0.0));
        let mut left = empty();
        left.merge(&one(3.0, 5.0));
        let mut right = one(3.0, 5.0);
        right.merge(&empty());
        for state in [left, right] {
            assert_eq!((state.m[0], state.l[0], state.o[0]), (3.0, 1.0, 5.0));
        }
    }

    #[test]
    fn scores_of_ten_thousand_do_not_overflow() {
        let mut state = one(-10_000.0, 1.0);
        state.merge(&one(10_000.0, 2.0));
        state.merge(&one(10_000.0, 4.0));
        let mut out = [0.0];
        state.finish(0, &mut out);
        assert_eq!(out, [3.0]);
    }
}
