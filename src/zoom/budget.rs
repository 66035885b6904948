//! Which spans a query head zooms, within a budget of rows.

/// Spans of one layer and KV head as one query head sees them, in order.
#[derive(Clone, Copy, Debug)]
pub struct Candidate {
    pub gate: f32,
    /// |S|.
    pub tokens: usize,
}

/// The spans that a query head zooms: those whose gate is above `threshold` (tau), within
/// `budget` rows, ascending.
///
/// Without a zoom, the head attends `resident` rows and one coarse row a span. Zooming a span
/// replaces its coarse row by |S| rows. Spans are taken by falling gate, ties by lower index; one
/// that does not fit is skipped and the walk goes on, as in the reference.
pub fn select(
    spans: &[Candidate],
    threshold: f32,
    resident: usize,
    budget: Option<usize>,
) -> Vec<usize> {
    let mut zoomed: Vec<usize> = (0..spans.len()).filter(|&i| spans[i].gate > threshold).collect();
    let Some(budget) = budget else { return zoomed };
    // A stable sort keeps the lower index first among equals.
    zoomed.sort_by(|&a, &b| spans[b].gate.total_cmp(&spans[a].gate));
    let mut used = resident.saturating_add(spans.len());
    zoomed.retain(|&i| {
        let more = spans[i].tokens.saturating_sub(1);
        let fits = used.saturating_add(more) <= budget;
        if fits {
            used = used.saturating_add(more);
        }
        fits
    });
    zoomed.sort_unstable();
    zoomed
}

/// The spans that any head of a group zoomed, ascending: what its KV head has to rebuild.
pub fn union<'a>(zoomed_of_heads: impl IntoIterator<Item = &'a [usize]>) -> Vec<usize> {
    let mut all: Vec<usize> = zoomed_of_heads.into_iter().flatten().copied().collect();
    all.sort_unstable();
    all.dedup();
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidates(spans: &[(f32, usize)]) -> Vec<Candidate> {
        spans.iter().map(|&(gate, tokens)| Candidate { gate, tokens }).collect()
    }

    #[test]
    fn without_a_budget_every_gate_above_the_threshold_zooms() {
        let spans = candidates(&[(0.5, 10), (0.6, 10), (0.4, 10)]);
        assert_eq!(select(&spans, 0.5, 0, None), [1]);
        assert_eq!(select(&spans, 0.0, 0, None), [0, 1, 2]);
    }

    #[test]
    fn a_span_that_does_not_fit_is_skipped_and_the_walk_goes_on() {
        let spans = candidates(&[(0.9, 10), (0.8, 50), (0.7, 5), (0.6, 4)]);
        // 2 residents + 4 coarse rows + 9 + 4 = 19; the last span needs 3 more.
        assert_eq!(select(&spans, 0.5, 2, Some(19)), [0, 2]);
        assert_eq!(select(&spans, 0.5, 2, Some(22)), [0, 2, 3]);
    }

    #[test]
    fn equal_gates_go_by_lower_index() {
        let spans = candidates(&[(0.7, 5), (0.7, 5), (0.7, 5)]);
        assert_eq!(select(&spans, 0.5, 0, Some(11)), [0, 1]);
    }

    #[test]
    fn a_budget_below_what_stays_anyway_zooms_only_what_costs_nothing() {
        let spans = candidates(&[(0.9, 10), (0.8, 1)]);
        assert!(select(&spans, 0.5, 0, Some(0)).is_empty());
        assert_eq!(select(&spans, 0.5, 0, Some(2)), [1]);
        assert!(select(&spans, 0.5, usize::MAX, Some(9)).is_empty());
    }

    #[test]
    fn a_group_rebuilds_what_any_of_its_heads_zoomed() {
        assert_eq!(union([[1, 4].as_slice(), &[], &[0, 4]]), [0, 1, 4]);
    }
}
