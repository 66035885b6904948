//! Saving and loading (docs/state.md, "The index").

use std::path::Path;

use super::budget;
use super::context::Context;
use super::sequence::Sequence;
use crate::error::{Result, fail};
use crate::kernels::RowCodec;
use crate::params::{BasisCodec, Params, RoutingKind};
use crate::state::{self, Identity, Sink, Source};
use crate::store::{Image, ImageReader};

/// Which sequences a state is of.
const ALL: i32 = -1;

impl Context {
    /// Bytes that [`Self::save_to`] gives out.
    pub fn state_size(&self, id: i32) -> Result<u64> {
        Ok(state::size(&self.image(id)?))
    }

    /// Gives out the state of a sequence, or of all where `id` is -1.
    pub fn save_to(&self, id: i32, sink: &mut Sink) -> Result<()> {
        state::write(&self.model.fingerprint, &self.image(id)?, sink)
    }

    /// Saves to a file, which is replaced whole or stays as it was.
    pub fn save_file(&self, id: i32, path: &Path) -> Result<()> {
        let image = self.image(id)?;
        state::save_file(path, state::size(&image), |sink| {
            state::write(&self.model.fingerprint, &image, sink)
        })
    }

    fn image(&self, id: i32) -> Result<Image> {
        self.require_no_pass("state_save")?;
        let indices = match id {
            ALL => 0..self.sequences.len(),
            id => {
                let index = self.sequence_index(id)?;
                index..index + 1
            }
        };
        let mut image = Image::default();
        write_params(&self.params, &mut image);
        let geometry = self.model.geometry_bytes();
        image.count(geometry.len());
        image.index.extend_from_slice(&geometry);
        let held = indices.filter(|&index| self.sequences[index].is_some());
        image.count(held.clone().count());
        for index in held {
            let Some(sequence) = &self.sequences[index] else { continue };
            image.u32(index as u32);
            sequence.save(&mut image)?;
        }
        Ok(image)
    }

    /// Takes a state from `source`: in the place of sequence `id`, or of all sequences where `id`
    /// is -1. Everything is verified before anything changes.
    pub fn load_from(&mut self, id: i32, len: Option<u64>, source: &mut Source) -> Result<()> {
        self.require_no_pass("state_load")?;
        if id != ALL {
            self.sequence_index(id)?;
        }
        let identity = Identity { fingerprint: &self.model.fingerprint, len };
        let store = self.store.for_sequence();
        let (index, parts) = state::read(&identity, &store, source)?;
        let mut image = ImageReader::new(&index, parts);
        let loaded = self.restore(id, &mut image)?;
        image.finish()?;
        drop(image);
        self.replace(id, loaded)
    }

    pub fn load_file(&mut self, id: i32, path: &Path) -> Result<()> {
        state::load_file(path, |len, source| self.load_from(id, Some(len), source))
    }

    /// The sequences of an image, by their numbers here.
    fn restore(&self, id: i32, image: &mut ImageReader) -> Result<Vec<(usize, Sequence)>> {
        check_params(&self.params, image)?;
        let geometry = self.model.geometry_bytes();
        let len = image.length("bytes of geometry")?;
        let found = (0..len).map(|_| image.u8()).collect::<Result<Vec<u8>>>()?;
        if found != geometry {
            fail!(Unsupported, "the state belongs to a model of another shape");
        }
        let most = if id == ALL { self.sequences.len() } else { 1 };
        let n = image.u64()?;
        if n > most as u64 {
            let all = if id == ALL { "" } else { "; sequence -1 loads all" };
            fail!(Sequence, "the state holds {n} sequences, expected at most {most}{all}");
        }
        let mut loaded: Vec<(usize, Sequence)> = Vec::new();
        for _ in 0..n {
            let saved = image.u32()? as usize;
            let index = if id == ALL { saved } else { id as usize };
            if index >= self.sequences.len() || loaded.last().is_some_and(|(l, _)| *l >= index) {
                let last = self.sequences.len() - 1;
                fail!(
                    Sequence,
                    "the state holds sequence {saved}, expected 0 to {last}, once each"
                );
            }
            let sequence = Sequence::restore(&self.model, &self.params, &self.store, image)?;
            loaded.push((index, sequence));
        }
        Ok(loaded)
    }

    /// Puts loaded sequences in the place of others. Where they don't fit the budget, nothing
    /// changes.
    fn replace(&mut self, id: i32, loaded: Vec<(usize, Sequence)>) -> Result<()> {
        let replaced =
            if id == ALL { 0..self.sequences.len() } else { id as usize..id as usize + 1 };
        let mut before: Vec<Option<Sequence>> = Vec::new();
        before.try_reserve_exact(replaced.len())?;
        before.extend(self.sequences[replaced.clone()].iter_mut().map(Option::take));
        for (index, sequence) in loaded {
            self.sequences[index] = Some(sequence);
        }
        let fits = budget::fit(self, &[]);
        if fits.is_err() {
            for (slot, sequence) in self.sequences[replaced].iter_mut().zip(before) {
                *slot = sequence;
            }
        }
        fits
    }
}

/// What a state's bytes mean depends on these; the other params may differ.
fn write_params(params: &Params, image: &mut Image) {
    params_that_matter(params).iter().for_each(|&(_, value)| image.u8(value));
}

fn check_params(params: &Params, image: &mut ImageReader) -> Result<()> {
    for (name, expected) in params_that_matter(params) {
        let found = image.u8()?;
        if found != expected {
            fail!(
                Unsupported,
                "the state was made with {name} {found}, this context has {name} {expected}"
            );
        }
    }
    Ok(())
}

/// The numbers are those of the header's enums, and never change.
fn params_that_matter(params: &Params) -> [(&'static str, u8); 5] {
    let codec = |codec: RowCodec| match codec {
        RowCodec::F32 => 0,
        RowCodec::F16 => 1,
        RowCodec::Int8 => 2,
    };
    let routing = match params.routing {
        RoutingKind::Ladder => 0,
        RoutingKind::Paper => 1,
    };
    let basis = match params.basis_codec {
        BasisCodec::Rows(rows) => codec(rows),
        BasisCodec::LowRank(RowCodec::F16) => 3,
        BasisCodec::LowRank(RowCodec::Int8) => 4,
        BasisCodec::LowRank(RowCodec::F32) => 5,
    };
    [
        ("routing", routing),
        ("value_sketch", u8::from(params.value_sketch)),
        ("codec_resident", codec(params.resident_codec)),
        ("codec_basis", basis),
        ("codec_mean", codec(params.mean_codec)),
    ]
}
