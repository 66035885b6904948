//! Segmentation against the reference implementation's.

mod golden;

use golden::{integer, integers, number, numbers, read_json, spans};
use sekv::segment::{Moments, SegmentRule, cut, segment};

/// Where the reference loses token 0; here it is an anchor (golden/README.md).
const LOST_FIRST_TOKEN: [usize; 13] = [2, 7, 8, 13, 19, 20, 21, 26, 31, 32, 23, 27, 34];

#[test]
fn anchors_threshold_and_spans_are_the_reference_s() {
    let cases = read_json("segmentation.json");
    assert_eq!(cases.len(), 36);
    for (index, case) in cases.iter().enumerate() {
        let surprisal = numbers(&case["surprisal"]);
        let rule = SegmentRule {
            alpha: number(case, "alpha") as f32,
            span_min: integer(case, "l_min"),
            span_max: 0,
        };
        let found = segment(&surprisal, &rule).unwrap();

        let threshold = number(case, "threshold");
        let error = (found.threshold - threshold).abs();
        assert!(error <= 1e-6 * threshold.abs(), "case {index}: {} {threshold}", found.threshold);

        let mut anchors = integers(&case["anchors"]);
        let mut expected = spans(case);
        if LOST_FIRST_TOKEN.contains(&index) {
            assert!(anchors.is_empty());
            anchors = vec![0];
            if surprisal.len() == 1 {
                expected.clear();
            }
        }
        assert_eq!(found.anchors, anchors, "case {index}");
        assert_eq!(found.spans, expected, "case {index}");
        assert_eq!(found.unknown, 0);

        let mut moments = Moments::new();
        for piece in surprisal.chunks(5) {
            moments.extend(piece);
        }
        let streamed = cut(&surprisal, moments.threshold(rule.alpha), &rule, true);
        assert_eq!(streamed, found, "case {index}, by running moments");
    }
}

#[test]
fn the_decode_cases_are_segmented_as_the_reference_did() {
    for (name, count) in [("decode.json", 16), ("gates.json", 8)] {
        let cases = read_json(name);
        assert_eq!(cases.len(), count);
        for case in &cases {
            let file = case["file"].as_str().unwrap();
            let surprisal = &golden::read_tensors(file)["surprisal"].data;
            let rule = SegmentRule {
                alpha: number(case, "alpha") as f32,
                span_min: integer(case, "l_min"),
                span_max: 512,
            };
            let found = segment(surprisal, &rule).unwrap();
            assert_eq!(found.anchors, integers(&case["anchors"]), "{file}");
            assert_eq!(found.spans, spans(case), "{file}");
        }
    }
}
