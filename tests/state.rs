//! Saved state: what is loaded goes on exactly as what was saved, and what is damaged or belongs
//! elsewhere changes nothing.

mod common;

use std::path::PathBuf;

use common::container::Container;
use common::world::*;
use common::{Shape, raw_params};
use sekv::cache::Context;
use sekv::error::Status;
use sekv::params::{BasisCodec, DenseLayers, FastBudget, Params, RoutingKind};

/// The default codecs, small enough to seal something soon.
fn coded() -> Params {
    Params {
        n_sinks: 2,
        window: 8,
        block_tokens: 16,
        layout_tokens: 64,
        share_threshold: 0.002,
        ..Params::default()
    }
}

fn coded_paper() -> Params {
    Params {
        routing: RoutingKind::Paper,
        basis_codec: BasisCodec::LowRank(sekv::kernels::RowCodec::F16),
        ..coded()
    }
}

/// A folder of this test's own.
fn folder(name: &str) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("state-{name}"));
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

/// Everything that the outside sees of both is equal from here on, bit for bit.
fn assert_goes_on_alike(mut one: World, mut other: World, what: &str) {
    other.random = one.random.clone();
    for n in [1, 1, 30, 1, 64, 1] {
        let (mut first, mut second) = (Vec::new(), Vec::new());
        for (world, out) in [(&mut one, &mut first), (&mut other, &mut second)] {
            let step = Step::new(&mut world.random.clone());
            *out = step.attend(&mut world.context);
            world.extend(0, n);
        }
        assert_eq!(first, second, "{what}");
        let bytes = |world: &World| {
            let memory = world.context.statistics().memory;
            (memory.fast_sketch, memory.fast_mean, memory.fast_layout, memory.slow)
        };
        assert_eq!(bytes(&one), bytes(&other), "{what}");
    }
}

#[test]
fn what_is_loaded_goes_on_as_what_was_saved() {
    let dense = Params { dense: DenseLayers::List(vec![1]), ..coded() };
    for params in [small(4), small_paper(), coded(), coded_paper(), dense] {
        for medium in media() {
            let params = on(&medium, &params);
            // Before there is a layout, at it, behind it, in the middle of a prompt, and while
            // tokens decode.
            for passes in [&[1][..], &[40], &[40, 40], &[64, 30], &[200], &[90, 1, 1, 1, 70]] {
                let mut world = World::new(params.clone(), 1);
                passes.iter().for_each(|&n| world.extend(0, n));
                let mut loaded = World::new(params.clone(), 1);
                loaded.load(&world.save(0), 0);
                assert_eq!(world.save(0).bytes, loaded.save(0).bytes, "{passes:?} {params:?}");
                assert_goes_on_alike(world, loaded, &format!("{passes:?} {params:?}"));
            }
        }
    }
}

#[test]
fn what_was_cut_and_moved_is_saved_as_it_is() {
    for params in [small(4), small_paper(), coded(), coded_paper()] {
        let mut world = World::new(params.clone(), 2);
        world.extend(0, 250);
        world.context.remove(0, 30, 75).unwrap();
        world.context.shift(0, 75, 140, -20).unwrap();
        world.context.shift(0, 140, -1, 1000).unwrap();
        world.context.shift(0, 0, 1, 0).unwrap();
        world.context.remove(0, 1240, -1).unwrap();
        let last = world.context.position_max(0).unwrap();
        let bytes = world.save(0).bytes;
        let mut again = new_context(&world.params);
        load(&mut again, 0, &bytes).unwrap();
        assert_eq!(again.position_max(0).unwrap(), last);
        for seed in 0..4 {
            let step = Step::new(&mut common::Random(seed));
            assert_eq!(step.attend(&mut world.context), step.attend(&mut again), "{params:?}");
        }
    }
}

#[test]
fn a_state_goes_from_one_medium_to_every_other() {
    for (params, bound) in both_routings() {
        let mut world = World::new(params.clone(), 3);
        world.extend(0, 120);
        let saved = world.save(0);
        for medium in media() {
            let mut other = World::new(on(&medium, &params), 4);
            other.load(&saved, 2);
            other.check(bound, "loaded");
            other.extend(2, 40);
            other.check(bound, "and grown");
            let memory = other.context.statistics().memory;
            let is_file = medium.basis_folder.is_some();
            assert_eq!(memory.slow_file, if is_file { memory.slow } else { 0 });
            assert!(memory.slow > 0);
        }
    }
}

#[test]
fn copies_that_share_are_saved_and_loaded_once() {
    for (params, bound) in both_routings() {
        let mut world = World::new(params, 5);
        world.extend(0, 120);
        let one = (world.save(0).bytes.len(), world.context.statistics().memory);
        world.copy(0, 1, -1, -1);
        world.copy(0, 3, -1, -1);
        world.extend(3, 20);
        let saved = world.save(-1);
        assert!(saved.bytes.len() < 2 * one.0, "{} of {}", saved.bytes.len(), one.0);
        world.move_to_a_new_context();
        world.check(bound, "moved");
        let memory = world.context.statistics().memory;
        assert!(memory.slow < one.1.slow * 3 / 2);
        world.extend(1, 30);
        world.extend(3, 3);
        world.check(bound, "on their own ways");
    }
}

#[test]
fn two_contexts_share_a_prefix_that_both_have_loaded() {
    for medium in media() {
        for (params, bound) in both_routings() {
            let mut world = World::new(on(&medium, &params), 6);
            world.extend(0, 200);
            let saved = world.save(0);
            drop(world);
            let mut one = World::new(on(&medium, &params), 7);
            let mut other = World::new(on(&medium, &params), 8);
            one.load(&saved, 0);
            other.load(&saved, 1);
            // Each goes on with another text, and ends when it likes.
            one.extend(0, 30);
            other.extend(1, 50);
            one.check(bound, "one");
            drop(one);
            other.remove(1, 20, 45);
            other.check(bound, "other");
        }
    }
}

#[test]
fn an_empty_sequence_is_saved_and_empties_what_it_is_loaded_to() {
    let mut world = World::new(small(4), 9);
    let empty = world.save(2);
    world.extend(0, 60);
    world.extend(1, 60);
    world.load(&empty, 1);
    world.check(ROUNDING, "emptied");
    let nothing = World::new(small(4), 10).save(-1);
    world.load(&nothing, 0);
    world.check(ROUNDING, "all emptied");
}

#[test]
fn a_load_replaces_what_was_there() {
    for (params, bound) in both_routings() {
        let mut world = World::new(params, 11);
        world.extend(0, 90);
        world.extend(1, 30);
        let (zero, all) = (world.save(0), world.save(-1));
        world.extend(0, 50);
        world.extend(2, 70);
        world.load(&zero, 0);
        world.check(bound, "taken back");
        world.load(&zero, 3);
        world.check(bound, "and again elsewhere");
        world.load(&all, 0);
        world.check(bound, "all of them");
    }
}

#[test]
fn files_are_saved_and_loaded_whole() {
    let folder = folder("files");
    let path = folder.join("a state");
    for (params, bound) in both_routings() {
        let mut world = World::new(params, 12);
        world.extend(0, 100);
        world.context.save_file(0, &path).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), world.save(0).bytes);
        let lists = world.lists.clone();
        world.extend(0, 10);
        world.context.load_file(0, &path).unwrap();
        world.lists = lists;
        world.check(bound, "loaded");
        let error = world.context.load_file(0, &folder.join("none")).unwrap_err();
        assert_eq!(error.status, Status::Io);
        assert!(error.message.contains("none"), "{error}");
        let error = world.context.save_file(0, &folder.join("none/a")).unwrap_err();
        assert_eq!(error.status, Status::Io);
        world.check(bound, "after refusals");
    }
    let names: Vec<_> = std::fs::read_dir(&folder).unwrap().collect();
    assert_eq!(names.len(), 1);
}

#[test]
fn a_file_that_shrinks_or_disappears_after_it_was_loaded_is_not_missed() {
    let path = folder("gone").join("state");
    for medium in media() {
        for (params, bound) in both_routings() {
            let mut world = World::new(on(&medium, &params), 25);
            world.extend(0, 150);
            world.context.save_file(0, &path).unwrap();
            let lists = world.lists.clone();
            let mut loaded = World::new(on(&medium, &params), 26);
            loaded.context.load_file(0, &path).unwrap();
            loaded.lists = lists;
            std::fs::File::options().write(true).open(&path).unwrap().set_len(100).unwrap();
            loaded.check(bound, "cut short");
            assert!(loaded.context.load_file(1, &path).is_err());
            std::fs::remove_file(&path).unwrap();
            loaded.extend(0, 20);
            loaded.check(bound, "gone");
        }
    }
}

/// What a refused load must leave as it was.
fn assert_untouched(world: &mut World, bytes: &[u8], what: &str) {
    assert_eq!(world.save(-1).bytes, bytes, "{what}");
}

#[test]
fn a_state_that_belongs_elsewhere_is_refused() {
    let mut world = World::new(small(4), 13);
    world.extend(0, 100);
    let saved = world.save(0);
    let raw = small(4);
    let int8 = sekv::kernels::RowCodec::Int8;
    for (params, what) in [
        (small_paper(), "routing 0, this context has routing 1"),
        (Params { value_sketch: true, ..raw.clone() }, "value_sketch"),
        (Params { resident_codec: int8, ..raw.clone() }, "codec_resident"),
        (Params { basis_codec: BasisCodec::Rows(int8), ..raw.clone() }, "codec_basis"),
        (Params { mean_codec: int8, ..raw.clone() }, "codec_mean"),
    ] {
        let mut other = World::new(params, 14);
        other.extend(1, 30);
        let before = other.save(-1).bytes;
        let error = load(&mut other.context, 0, &saved.bytes).unwrap_err();
        assert_eq!(error.status, Status::Unsupported);
        assert!(error.message.contains(what), "{error}");
        assert_untouched(&mut other, &before, what);
    }
    // Other layers, heads, dimensions; params alone have no fingerprint.
    for shape in [
        Shape::uniform(3, HEADS, KV_HEADS, DIM),
        Shape::uniform(LAYERS, HEADS, HEADS, DIM),
        Shape::uniform(LAYERS, HEADS, KV_HEADS, 2 * DIM),
    ] {
        let mut context = Context::new(shape.model(), raw_params()).unwrap();
        let error = load(&mut context, 0, &saved.bytes).unwrap_err();
        assert_eq!(error.status, Status::Unsupported, "{error}");
        assert!(error.message.contains("another shape"), "{error}");
    }
    // Other routing weights.
    let mut paper = World::new(small_paper(), 15);
    paper.extend(0, 100);
    let mut other = World::new(Params { seed: 1, ..small_paper() }, 16);
    let error = load(&mut other.context, 0, &paper.save(0).bytes).unwrap_err();
    assert!(error.message.contains("routing weights"), "{error}");
}

#[test]
fn a_state_that_does_not_fit_is_refused() {
    let mut world = World::new(small(4), 17);
    (0..SEQUENCES).for_each(|s| world.extend(s, 60));
    let all = world.save(-1);
    // One sequence is asked for, or fewer are there.
    let error = load(&mut world.context, 0, &all.bytes).unwrap_err();
    assert_eq!(error.status, Status::Sequence, "{error}");
    let narrow = Params { n_seq_max: 2, ..world.params.clone() };
    let error = load(&mut new_context(&narrow), -1, &all.bytes).unwrap_err();
    assert_eq!(error.status, Status::Sequence, "{error}");
    let held = world.context.statistics().memory.fast;
    let one = world.save(0);
    world.context.clear().unwrap();
    world.lists.iter_mut().for_each(Vec::clear);
    world.extend(0, 30);
    let before = world.save(-1).bytes;
    world.context.set_fast_budget(FastBudget::Bytes(held / 100));
    for saved in [&all, &one] {
        let to = saved.s.min(1);
        let error = load(&mut world.context, to, &saved.bytes).unwrap_err();
        assert_eq!(error.status, Status::Budget, "{error}");
        assert_untouched(&mut world, &before, "budget");
    }
    for id in [-2, SEQUENCES as i32] {
        assert_eq!(load(&mut world.context, id, &one.bytes).unwrap_err().status, Status::Sequence);
        assert!(world.context.state_size(id).is_err());
    }
}

#[test]
fn nothing_is_saved_or_loaded_during_a_pass() {
    let mut world = World::new(small(4), 18);
    world.extend(0, 50);
    let saved = world.save(0);
    let batch = [sekv::cache::BatchToken { position: 50, sequences: &[0] }];
    world.context.begin(&batch).unwrap();
    let error = world.context.save_to(0, &mut |_| Ok(())).unwrap_err();
    assert_eq!(error.status, Status::Order);
    assert_eq!(load(&mut world.context, 0, &saved.bytes).unwrap_err().status, Status::Order);
    world.context.abort().unwrap();
    world.check(ROUNDING, "afterwards");
}

/// Loads damaged bytes, which must fail and change nothing.
fn refuses(world: &mut World, before: &[u8], bytes: &[u8], what: &str) {
    let Err(error) = load(&mut world.context, 0, bytes) else { panic!("{what} was loaded") };
    let expected = [Status::Format, Status::Unsupported];
    assert!(expected.contains(&error.status), "{what}: {error:?}");
    assert!(error.message.len() > 10 && !error.message.contains('\n'), "{what}: {error}");
    assert_eq!(world.context.statistics().n_tokens, 37, "{what}");
    if what.ends_with('0') {
        assert_untouched(world, before, what);
    }
}

#[test]
fn a_state_cut_at_any_byte_or_with_any_bit_flipped_changes_nothing() {
    for (params, bound) in [(coded(), 0.2), (coded_paper(), f32::INFINITY), (small(4), ROUNDING)] {
        let mut world = World::new(params, 19);
        world.extend(0, 100);
        let bytes = world.save(0).bytes;
        world.remove(0, -1, -1);
        world.extend(1, 37);
        let before = world.save(-1).bytes;
        for len in 0..bytes.len() {
            refuses(&mut world, &before, &bytes[..len], &format!("the first {len}"));
        }
        // The header, the index, and some of everything else.
        let index_len = u64::from_le_bytes(bytes[56..64].try_into().unwrap()) as usize;
        let index_end = 128 + index_len.next_multiple_of(64);
        let payload = bytes.len() - index_end;
        let mut random = common::Random(20);
        let random_bits = (0..10_000).map(|_| 8 * index_end + random.below(8 * payload));
        let mut damaged = bytes.clone();
        for bit in (0..8 * index_end).chain(random_bits) {
            damaged[bit / 8] ^= 1 << (bit % 8);
            refuses(&mut world, &before, &damaged, &format!("bit {bit}"));
            damaged[bit / 8] ^= 1 << (bit % 8);
        }
        assert_untouched(&mut world, &before, "all of it");
        world.check(bound, "untouched");
        load(&mut world.context, 0, &bytes).unwrap();
    }
}

/// Damage that the checksums agree with: the index says what cannot be.
#[test]
fn an_index_that_lies_is_refused_or_loads_something_that_can_be() {
    for params in [coded(), coded_paper(), small(4)] {
        let mut world = World::new(params.clone(), 21);
        world.extend(0, 100);
        let bytes = world.save(0).bytes;
        let index_len = u64::from_le_bytes(bytes[56..64].try_into().unwrap()) as usize;
        let n_parts: u32 = [64, 68]
            .map(|at| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()))
            .iter()
            .sum();
        let start = 128 + 12 * n_parts as usize;
        let (mut refused, mut loaded) = (0, 0);
        for at in start..128 + index_len {
            for value in [0, 1, bytes[at].wrapping_add(1), 0x80, 0xff] {
                let mut lying = bytes.clone();
                lying[at] = value;
                let sum = sekv::store::checksum(&lying[128..128 + index_len]);
                lying[72..76].copy_from_slice(&sum.to_le_bytes());
                let sum = sekv::store::checksum(&lying[..124]);
                lying[124..128].copy_from_slice(&sum.to_le_bytes());
                let mut other = World::new(params.clone(), 22);
                other.extend(1, 5);
                match load(&mut other.context, 0, &lying) {
                    Ok(()) => {
                        loaded += 1;
                        // Whatever it says, it serves.
                        let last = other.context.position_max(0).unwrap();
                        Step::new(&mut other.random).attend(&mut other.context);
                        other.context.remove(0, last / 2, last / 2 + 1).unwrap();
                        other.context.remove(0, last - 3, -1).unwrap();
                    }
                    Err(_) => refused += 1,
                }
            }
        }
        println!("{refused} refused, {loaded} loaded");
        assert!(refused > loaded);
    }
}

/// Checksums say nothing about who made a state. Rows that are no numbers give answers that are
/// none, in their own sequence alone.
#[test]
fn parts_that_are_no_numbers_are_refused_or_stay_in_their_sequence() {
    for (params, bound) in [
        (small(4), ROUNDING),
        (small_paper(), ZOOMED),
        (coded(), 0.2),
        (coded_paper(), f32::INFINITY),
    ] {
        for n in [30, 100] {
            let mut world = World::new(params.clone(), 24);
            world.extend(0, n);
            let bytes = world.save(0).bytes;
            let n_parts = Container::parse(&bytes).unwrap().parts.len();
            for part in 0..n_parts {
                let mut container = Container::parse(&bytes).unwrap();
                container.parts[part].bytes.fill(0xff);
                let mut other = World::new(params.clone(), 25);
                other.extend(1, 40);
                if load(&mut other.context, 0, &container.encode()).is_err() {
                    continue;
                }
                other.lists[0].clone_from(&world.lists[0]);
                other.remove(0, 20, 25);
                other.extend(0, 70);
                other.extend(0, 1);
                other.worst = 0.0;
                other.extend(1, 1);
                assert!(other.worst < bound, "part {part}: {}", other.worst);
            }
        }
    }
}

/// The states of every version that ever was, in tests/states.
#[test]
fn states_of_every_version_are_read() {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/states");
    for (name, params) in [("ladder", coded()), ("paper", coded_paper())] {
        let mut world = World::new(params, 23);
        world.extend(0, 200);
        world.context.remove(0, 50, 60).unwrap();
        world.context.shift(0, 60, -1, -4).unwrap();
        let path = folder.join(format!("v1-{name}.sekv"));
        if std::env::var_os("UPDATE_STATES").is_some() {
            world.context.save_file(0, &path).unwrap();
        }
        let mut context = new_context(&world.params);
        context.load_file(0, &path).unwrap();
        assert_eq!(context.position_max(0).unwrap(), 195);
        assert_eq!(context.statistics().n_tokens, 190);
        // What this version makes of the same tokens attends alike: not to the bit, since sums may
        // be made in another order one day.
        for seed in 0..8 {
            let step = Step::new(&mut common::Random(seed));
            let want = step.attend(&mut world.context);
            let want: Vec<f64> = want.iter().map(|&x| f64::from(x)).collect();
            let worst = common::difference(&step.attend(&mut context), &want);
            assert!(worst < 0.05, "{name}: {worst}");
        }
    }
}

#[test]
fn threads_save_and_load_the_same_states_side_by_side() {
    let folder = folder("threads");
    let path = folder.join("shared");
    let mut world = World::new(small(4), 24);
    world.extend(0, 150);
    world.context.save_file(0, &path).unwrap();
    std::thread::scope(|scope| {
        for seed in 0..4 {
            let (path, lists, medium) = (&path, &world.lists, &media()[seed % 3]);
            let params = on(medium, &small(4));
            scope.spawn(move || {
                for round in 0..6 {
                    let mut own = World::new(params.clone(), 30 + seed as u64);
                    own.context.load_file(0, path).unwrap();
                    own.lists.clone_from(lists);
                    own.extend(0, 10 + round);
                    own.check(ROUNDING, "loaded beside others");
                    // The same content, by whoever comes last.
                    let mut again = World::new(params.clone(), 24);
                    again.extend(0, 150);
                    again.context.save_file(0, path).unwrap();
                }
            });
        }
    });
    world.context.load_file(0, &path).unwrap();
    world.check(ROUNDING, "in the end");
}
