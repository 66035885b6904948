//! A sequence in an image (docs/state.md, "A sequence").

use std::sync::Arc;

use super::{METADATA_STEP, Sequence};
use crate::cache::queries::QueryRing;
use crate::cache::residents::Residents;
use crate::error::{Result, fail};
use crate::kernels::RowCodec;
use crate::model::Model;
use crate::params::Params;
use crate::routing;
use crate::store::{Image, ImageReader, SlowStore};

impl Sequence {
    pub fn save(&self, image: &mut Image) -> Result<()> {
        image.count(self.n_tokens());
        // Where nothing is sealed, the params say.
        image.count(if self.sealed.n_tokens() > 0 { self.n_sinks } else { 0 });
        image.flag(self.settled);
        image.flag(self.in_prompt);
        image.blob(self.positions.iter().flat_map(|p| p.to_le_bytes()).collect());
        image.blob(self.surprisal.iter().flat_map(|h| h.to_le_bytes()).collect());
        self.sealed.save(image)?;
        self.residents.save(image);
        self.queries.save(image);
        Ok(())
    }

    /// The sequence that an image holds. Nothing in it is trusted.
    pub fn restore(
        model: &Arc<Model>,
        params: &Arc<Params>,
        store: &SlowStore,
        image: &mut ImageReader,
    ) -> Result<Self> {
        let n_tokens = image.count("tokens", 1, i32::MAX as usize)?;
        let n_sinks = image.count("sinks", 0, n_tokens)?;
        let (settled, in_prompt) = (image.flag()?, image.flag()?);
        let positions = restore_numbers("positions", n_tokens, i32::from_le_bytes, image)?;
        if !positions.is_sorted_by(|a, b| a < b) || positions[0] < 0 {
            fail!(Format, "the state's positions are out of order");
        }
        let surprisal = restore_numbers("surprisal", n_tokens, f32::from_le_bytes, image)?;
        if surprisal.iter().any(|h| *h < 0.0 || h.is_infinite()) {
            fail!(Format, "the state has surprisal that is negative or infinite");
        }
        let sealed = routing::restore(model, params, store, image)?;
        let n_sealed = sealed.n_tokens();
        if n_sealed > n_tokens || n_sealed > 0 && n_sinks > n_tokens - n_sealed {
            fail!(
                Format,
                "the state has {n_sealed} sealed tokens and {n_sinks} sinks of {n_tokens} tokens"
            );
        }
        let codec = if sealed.has_layout() { params.resident_codec } else { RowCodec::F32 };
        let n_rows = n_tokens - n_sealed;
        let mut residents = Residents::new(&model.geometry, codec);
        residents.restore(&model.geometry, n_rows, Self::rows_to_reserve(n_rows), image)?;
        let queries = QueryRing::restore(&model.geometry, n_tokens, image)?;
        Ok(Self {
            model: Arc::clone(model),
            params: Arc::clone(params),
            positions,
            surprisal,
            residents,
            n_sinks,
            sealed,
            queries: Arc::new(queries),
            settled,
            in_prompt,
            ahead: None,
        })
    }
}

fn restore_numbers<T>(
    what: &str,
    n: usize,
    number: fn([u8; 4]) -> T,
    image: &mut ImageReader,
) -> Result<Vec<T>> {
    let bytes = image.blob(what, 4 * n)?;
    let mut numbers = Vec::new();
    numbers.try_reserve_exact(n.next_multiple_of(METADATA_STEP))?;
    numbers.extend(bytes.as_chunks::<4>().0.iter().map(|bytes| number(*bytes)));
    Ok(numbers)
}
