//! Any bytes as a saved state. What is loaded is a state: it is saved and loaded again as it is,
//! and serves passes, removals and shifts.
//!
//! An input is a byte of `states`' bits, then a state. A mutation changes the bytes as they are, or
//! those of the index or of one part, which may grow and shrink.

#![no_main]

use libfuzzer_sys::{fuzz_mutator, fuzz_target, fuzzer_mutate};
use sekv::error::Status;
use sekv_fuzz::check_refusal;
use sekv_fuzz::common::Random;
use sekv_fuzz::common::container::Container;
use sekv_fuzz::states::{self, ALL, SEQUENCES, UNREPAIRED, new_context};

fuzz_target!(|input: &[u8]| {
    let Some((&kind, bytes)) = input.split_first() else { return };
    let repaired = match kind & UNREPAIRED {
        0 => Container::parse(bytes).map(|container| container.encode()),
        _ => None,
    };
    let id = if kind & ALL == 0 { 0 } else { -1 };
    let mut context = new_context(kind);
    if let Err(error) = states::load(&mut context, id, repaired.as_deref().unwrap_or(bytes)) {
        let kinds = [Status::Format, Status::Unsupported, Status::Sequence, Status::Memory];
        return check_refusal(&error, &kinds);
    }
    let saved = states::save(&context, id);
    let mut again = new_context(kind);
    states::load(&mut again, id, &saved).expect("what was saved can be loaded");
    assert!(states::save(&again, id) == saved, "a state changed on its way");

    let mut random = Random(u64::from(kind));
    for sequence in 0..SEQUENCES {
        states::pass(&mut context, &mut random, sequence, 1, false);
        let first = context.position_min(sequence).expect("the sequence exists").max(0);
        let last = context.position_max(sequence).expect("the sequence exists").max(0);
        let middle = first + (last - first) / 2;
        context.remove(sequence, middle, middle + 1).expect("positions can be removed");
        // Refused where it would bring a position beyond the largest.
        let _ = context.shift(sequence, middle, -1, 3);
        states::pass(&mut context, &mut random, sequence, 6, true);
        states::pass(&mut context, &mut random, sequence, 1, true);
    }
    states::save(&context, id);
});

fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, seed: u32| {
    mutate_part(data, size, max_size, seed).unwrap_or_else(|| fuzzer_mutate(data, size, max_size))
});

/// Changes the index or one part, and gives back the input's new size.
fn mutate_part(data: &mut [u8], size: usize, max_size: usize, seed: u32) -> Option<usize> {
    let mut random = Random(u64::from(seed));
    let mut container = Container::parse(data.get(1..size)?)?;
    let part = match random.below(8) {
        0 => return None,
        1..5 => &mut container.index,
        _ if container.parts.is_empty() => return None,
        _ => {
            let number = random.below(container.parts.len());
            &mut container.parts[number].bytes
        }
    };
    const ROOM: usize = 64;
    let len = part.len();
    part.resize(len + ROOM, 0);
    let len = fuzzer_mutate(part, len, len + ROOM);
    part.truncate(len);
    let encoded = container.encode();
    let size = 1 + encoded.len();
    data.get_mut(1..size).filter(|_| size <= max_size)?.copy_from_slice(&encoded);
    Some(size)
}
