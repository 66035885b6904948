//! RoPE of keys that have moved: a shift of positions applied on read.

use super::geometry::{Geometry, RopeKind};

/// How keys turn when their position moves by `shift`. A key that was rotated for position p is,
/// turned, the same key rotated for position p + shift.
#[derive(Debug)]
pub struct Rotation {
    pub shift: i32,
    /// Dimensions that turn together, with cosine and sine of their angle.
    pairs: Vec<Turn>,
}

#[derive(Debug)]
struct Turn {
    dims: (usize, usize),
    cos: f32,
    sin: f32,
}

impl Rotation {
    pub fn new(geometry: &Geometry, shift: i32) -> Self {
        let n_pairs = if geometry.rope == RopeKind::None { 0 } else { geometry.n_rot / 2 };
        let pairs = geometry.rope_pairs().into_iter().take(n_pairs);
        let pairs = pairs.zip(&geometry.rope_frequencies).map(|(dims, &frequency)| {
            let (sin, cos) = (f64::from(shift) * f64::from(frequency)).sin_cos();
            Turn { dims, cos: cos as f32, sin: sin as f32 }
        });
        Self { shift, pairs: pairs.collect() }
    }

    /// Moves a key by `shift` positions.
    pub fn apply(&self, key: &mut [f32]) {
        for &Turn { dims: (i, j), cos, sin } in &self.pairs {
            (key[i], key[j]) = (key[i] * cos - key[j] * sin, key[i] * sin + key[j] * cos);
        }
    }

    /// Moves a key that is stored less its centre, and leaves it less the same centre.
    pub fn apply_centred(&self, key: &mut [f32], centre: &[f32]) {
        key.iter_mut().zip(centre).for_each(|(k, c)| *k += c);
        self.apply(key);
        key.iter_mut().zip(centre).for_each(|(k, c)| *k -= c);
    }

    /// Moves a query the other way: q . (R k) = (R^-1 q) . k.
    pub fn undo(&self, query: &mut [f32]) {
        for &Turn { dims: (i, j), cos, sin } in &self.pairs {
            (query[i], query[j]) =
                (query[i] * cos + query[j] * sin, query[j] * cos - query[i] * sin);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::ModelParams;

    fn geometry(rope: RopeKind) -> Geometry {
        let params = ModelParams {
            n_layer: 1,
            n_head: 1,
            head_dim_k: 10,
            n_rot: 6,
            rope,
            rope_freq_base: 100.0,
            ..ModelParams::default()
        };
        params.geometry().unwrap()
    }

    fn key() -> Vec<f32> {
        (0..10).map(|i| (i * i % 7) as f32 - 2.5).collect()
    }

    fn assert_close(found: &[f32], expected: &[f32]) {
        for (f, e) in found.iter().zip(expected) {
            assert!((f - e).abs() < 1e-5, "{found:?}, expected {expected:?}");
        }
    }

    /// Complex multiplication by e^(i shift f), by the definition of RoPE.
    #[test]
    fn pairs_turn_by_their_frequency_and_the_rest_stays() {
        for (rope, pairs) in
            [(RopeKind::Neox, [(0, 3), (1, 4), (2, 5)]), (RopeKind::Norm, [(0, 1), (2, 3), (4, 5)])]
        {
            let mut expected = key();
            for (n, (i, j)) in pairs.into_iter().enumerate() {
                let angle = 7.0 * 100f64.powf(-(n as f64) / 3.0);
                let (x, y) = (f64::from(key()[i]), f64::from(key()[j]));
                expected[i] = (x * angle.cos() - y * angle.sin()) as f32;
                expected[j] = (x * angle.sin() + y * angle.cos()) as f32;
            }
            let mut found = key();
            Rotation::new(&geometry(rope), 7).apply(&mut found);
            assert_close(&found, &expected);
        }
        let mut found = key();
        Rotation::new(&geometry(RopeKind::None), 7).apply(&mut found);
        assert_eq!(found, key());
    }

    #[test]
    fn a_query_turned_back_sees_what_the_turned_key_shows() {
        let rotation = Rotation::new(&geometry(RopeKind::Neox), -11);
        let query: Vec<f32> = key().iter().rev().copied().collect();
        let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(x, y)| x * y).sum::<f32>();
        let (mut turned_key, mut turned_query) = (key(), query.clone());
        rotation.apply(&mut turned_key);
        rotation.undo(&mut turned_query);
        assert!((dot(&query, &turned_key) - dot(&turned_query, &key())).abs() < 1e-4);
        rotation.undo(&mut turned_key);
        assert_close(&turned_key, &key());
    }

    #[test]
    fn the_centre_of_what_is_stored_turns_with_it() {
        let rotation = Rotation::new(&geometry(RopeKind::Norm), 3);
        let centre: Vec<f32> = (0..10).map(|i| i as f32 / 4.0).collect();
        let mut stored: Vec<f32> = key().iter().zip(&centre).map(|(k, c)| k - c).collect();
        rotation.apply_centred(&mut stored, &centre);
        let mut expected = key();
        rotation.apply(&mut expected);
        expected.iter_mut().zip(&centre).for_each(|(k, c)| *k -= c);
        assert_close(&stored, &expected);
    }
}
