use super::*;

const UNKNOWN: f32 = f32::NAN;

fn rule(alpha: f32, span_min: usize, span_max: usize) -> SegmentRule {
    SegmentRule { alpha, span_min, span_max }
}

fn bounds(segmentation: &Segmentation) -> Vec<(usize, usize, bool)> {
    segmentation.spans.iter().map(|s| (s.start, s.end, s.full_resolution)).collect()
}

/// Every token is an anchor or in one span, in order.
fn assert_covers(segmentation: &Segmentation, n: usize) {
    let mut seen = vec![0; n];
    for &anchor in &segmentation.anchors {
        seen[anchor] += 1;
    }
    for span in &segmentation.spans {
        assert!(!span.is_empty());
        for token in span.tokens() {
            seen[token] += 1;
        }
    }
    assert!(seen.iter().all(|&times| times == 1), "{segmentation:?}");
    assert!(segmentation.spans.windows(2).all(|pair| pair[0].end <= pair[1].start));
}

#[test]
fn no_tokens_give_nothing() {
    let segmentation = segment(&[], &rule(1.0, 0, 0)).unwrap();
    assert!(segmentation.anchors.is_empty() && segmentation.spans.is_empty());
}

#[test]
fn one_token_stays_whole_one_way_or_the_other() {
    assert_eq!(segment(&[0.0], &rule(1.0, 0, 0)).unwrap().anchors, [0]);
    assert_eq!(bounds(&segment(&[0.0], &rule(1.0, 16, 0)).unwrap()), [(0, 1, true)]);
}

#[test]
fn first_token_is_kept_where_nothing_surprises() {
    for value in [0.0, 1.25] {
        let segmentation = segment(&[value; 100], &rule(0.0, 16, 0)).unwrap();
        assert_eq!(segmentation.anchors, [0]);
        assert_eq!(bounds(&segmentation), [(1, 100, false)]);
    }
}

#[test]
fn a_later_stretch_need_not_keep_its_first_token() {
    let segmentation = cut(&[0.0; 100], 1.0, &rule(1.0, 16, 0), false);
    assert!(segmentation.anchors.is_empty());
    assert_eq!(bounds(&segmentation), [(0, 100, false)]);
}

#[test]
fn every_token_can_be_an_anchor() {
    let segmentation = cut(&[2.0; 10], 1.0, &rule(1.0, 16, 0), true);
    assert_eq!(segmentation.anchors.len(), 10);
    assert!(segmentation.spans.is_empty());
}

#[test]
fn spans_around_the_limits_are_judged_exactly() {
    // An anchor, then a span of exactly `length` tokens.
    let spans_of = |length: usize| {
        let mut surprisal = vec![0.0; length + 1];
        surprisal[0] = 9.0;
        bounds(&cut(&surprisal, 1.0, &rule(1.0, 16, 40), true))
    };
    assert_eq!(spans_of(15), [(1, 16, true)]);
    assert_eq!(spans_of(16), [(1, 17, false)]);
    assert_eq!(spans_of(40), [(1, 41, false)]);
    assert_eq!(spans_of(41), [(1, 22, false), (22, 42, false)]);
    assert_eq!(spans_of(81), [(1, 28, false), (28, 55, false), (55, 82, false)]);
}

#[test]
fn a_limit_that_no_span_reaches_changes_nothing() {
    let surprisal: Vec<f32> = (0..1000).map(|i| ((i * 7919) % 97) as f32 / 10.0).collect();
    let whole = segment(&surprisal, &rule(1.0, 4, 0)).unwrap();
    let longest = whole.spans.iter().map(Span::len).max().unwrap();
    assert_eq!(segment(&surprisal, &rule(1.0, 4, longest)).unwrap(), whole);
    assert_covers(&whole, 1000);
}

#[test]
fn a_prompt_that_is_one_span_is_cut_to_the_limit() {
    let segmentation = segment(&vec![0.5; 131_072], &SegmentRule::default()).unwrap();
    assert_covers(&segmentation, 131_072);
    assert!(segmentation.spans.iter().all(|s| s.len() <= 512 && s.len() >= 511));
}

#[test]
fn a_limit_of_one_token_is_legal() {
    let segmentation = segment(&[0.0; 20], &rule(1.0, 0, 1)).unwrap();
    assert_covers(&segmentation, 20);
    assert!(segmentation.spans.iter().all(|s| s.len() == 1));
}

#[test]
fn unknown_surprisal_falls_back_to_fixed_spans() {
    let segmentation = segment(&[UNKNOWN; 150], &rule(1.0, 16, 512)).unwrap();
    assert_eq!(segmentation.unknown, 150);
    assert_eq!(segmentation.anchors, [0]);
    assert_eq!(bounds(&segmentation), [(1, 65, false), (65, 129, false), (129, 150, false)]);
}

#[test]
fn a_few_unknown_tokens_do_not_cut_a_span() {
    let mut surprisal = vec![0.5; 100];
    surprisal[0] = UNKNOWN;
    surprisal[30] = UNKNOWN;
    surprisal[50] = 9.0;
    let segmentation = segment(&surprisal, &rule(1.0, 16, 0)).unwrap();
    assert_eq!((segmentation.anchors.as_slice(), segmentation.unknown), ([50].as_slice(), 2));
    assert_eq!(bounds(&segmentation), [(0, 50, false), (51, 100, false)]);
}

#[test]
fn a_long_unknown_run_is_cut_between_known_spans() {
    let mut surprisal = vec![0.5; 300];
    surprisal[10] = 9.0;
    surprisal[100..240].fill(UNKNOWN);
    let segmentation = segment(&surprisal, &rule(1.0, 16, 0)).unwrap();
    assert_covers(&segmentation, 300);
    let expected = [
        (0, 10, true),
        (11, 100, false),
        (100, 164, false),
        (164, 228, false),
        (228, 240, true),
        (240, 300, false),
    ];
    assert_eq!(bounds(&segmentation), expected);
}

#[test]
fn impossible_surprisal_is_refused_by_token() {
    for value in [-0.1, f32::INFINITY, f32::NEG_INFINITY] {
        let error = segment(&[0.0, 1.0, value], &SegmentRule::default()).unwrap_err();
        assert_eq!(error.status, crate::error::Status::Value);
        assert!(error.message.contains("token 2"), "{error}");
    }
}

#[test]
fn one_batch_of_running_moments_is_the_global_rule() {
    let surprisal: Vec<f32> = (0..500).map(|i| ((i * 7919) % 89) as f32 / 9.0).collect();
    let rule = rule(1.5, 4, 0);
    let mut moments = Moments::new();
    moments.extend(&surprisal);
    let streamed = cut(&surprisal, moments.threshold(rule.alpha), &rule, true);
    assert_eq!(streamed, segment(&surprisal, &rule).unwrap());
}
