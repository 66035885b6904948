//! How sealed tokens are cut into what is stored together.

use crate::span::Span;

/// Tokens that stay whole, then the tokens of one compressed span; either may be none. By index
/// into the sealed tokens. A sequence can be cut between two runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    pub first: usize,
    pub n_whole: usize,
    pub n_span: usize,
}

impl Run {
    pub fn end(&self) -> usize {
        self.first + self.n_whole + self.n_span
    }

    /// Where the span begins.
    pub fn span_first(&self) -> usize {
        self.first + self.n_whole
    }
}

/// Cuts sealed tokens `first..end` into runs; `spans` are the compressed ones among them,
/// ascending. All else stays whole.
pub fn runs(first: usize, end: usize, spans: &[Span]) -> Vec<Run> {
    let mut runs = Vec::with_capacity(spans.len() + 1);
    let mut at = first;
    for span in spans {
        runs.push(Run { first: at, n_whole: span.start - at, n_span: span.len() });
        at = span.end;
    }
    if at < end {
        runs.push(Run { first: at, n_whole: end - at, n_span: 0 });
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_cover_every_token_once() {
        let span = |start, end| Span { start, end, full_resolution: false };
        let found = runs(10, 30, &[span(12, 15), span(15, 20), span(21, 25)]);
        let expected = [(10, 2, 3), (15, 0, 5), (20, 1, 4), (25, 5, 0)];
        let expected = expected.map(|(first, n_whole, n_span)| Run { first, n_whole, n_span });
        assert_eq!(found, expected);
        assert_eq!(runs(0, 0, &[]), []);
        assert_eq!(runs(0, 3, &[span(0, 3)]), [Run { first: 0, n_whole: 0, n_span: 3 }]);
    }
}
