//! A decode step's attend allocates nothing once its buffers have grown.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use common::{Random, Shape, view};
use sekv::cache::{BatchToken, Context};
use sekv::params::{DenseLayers, Params};

/// Counts the allocations of a thread.
struct Counting;

thread_local! {
    static COUNT: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: hands everything on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.set(COUNT.get() + 1);
        // SAFETY: the caller's contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's contract.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        COUNT.set(COUNT.get() + 1);
        // SAFETY: the caller's contract.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const DIM: usize = 64;
const HEADS: usize = 6;
const KV_HEADS: usize = 2;

fn pass(context: &mut Context, random: &mut Random, first: i32, n: usize) -> usize {
    let tokens: Vec<BatchToken> = (first..first + n as i32)
        .map(|position| BatchToken { position, sequences: &[0] })
        .collect();
    context.begin(&tokens).unwrap();
    let mut keys = random.normals(n * KV_HEADS * DIM);
    let mut values = random.normals(n * KV_HEADS * DIM);
    let mut q = random.normals(n * HEADS * DIM);
    let mut out = vec![0.0; n * HEADS * DIM];
    let (k, v) = (view(&mut keys, DIM, KV_HEADS, n), view(&mut values, DIM, KV_HEADS, n));
    let (q, out) = (view(&mut q, DIM, HEADS, n), view(&mut out, DIM, HEADS, n));
    context.ingest(0, &k, &v).unwrap();
    COUNT.set(0);
    context.attend(0, &q, None, &out).unwrap();
    let count = COUNT.get();
    context.commit(None).unwrap();
    count
}

#[test]
fn a_decode_steps_attend_allocates_nothing_on_one_thread() {
    let params =
        Params { n_threads: 1, n_batch_max: 2048, dense: DenseLayers::None, ..Params::default() };
    let mut context =
        Context::new(Shape::uniform(1, HEADS, KV_HEADS, DIM).model(), params).unwrap();
    let mut random = Random(5);
    pass(&mut context, &mut random, 0, 2048);
    let counts: Vec<usize> =
        (0..400).map(|i| pass(&mut context, &mut random, 2048 + i, 1)).collect();
    // Buffers grow with the blocks and with the most tokens that a step has chosen yet, ever more
    // rarely.
    println!("steps that allocated: {}", counts.iter().filter(|count| **count > 0).count());
    assert!(counts[0] > 0, "nothing was counted");
    let late = counts[200..].iter().filter(|count| **count > 0).count();
    assert!(late <= 4, "{late} of the last 200 steps allocated: {:?}", &counts[200..]);
    assert!(statistics_say_that_tokens_were_chosen(&context));
}

fn statistics_say_that_tokens_were_chosen(context: &Context) -> bool {
    let statistics = context.statistics();
    statistics.n_sealed > 1500 && statistics.counters.fetched.mean() > 1.0
}
