//! A process that is killed while it seals or saves: what was saved before is whole.

#![cfg(unix)]

mod common;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use common::world::*;
use sekv::params::Params;

/// SEKV_KILLS sets how often a process is killed.
const KILLS: usize = 200;

/// Set for the process that is to be killed: where it works.
const WORK: &str = "SEKV_KILLED_FOLDER";

fn params(folder: &Path) -> Params {
    Params { basis_folder: Some(folder.to_owned()), ..small(4) }
}

/// Not a test of its own: what the killed process does, for ever. It saves now and then, seals
/// with every pass, and never says when.
#[test]
fn works_until_it_is_killed() {
    let Some(folder) = std::env::var_os(WORK).map(PathBuf::from) else { return };
    let mut world = World::new(params(&folder), 1);
    loop {
        if world.lists[0].len() > 400 {
            world.remove(0, -1, -1);
        }
        world.extend(0, 25);
        world.context.save_file(0, &folder.join("saved")).unwrap();
        println!("saved");
    }
}

#[test]
fn what_was_saved_before_a_kill_is_whole() {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("killed");
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    let kills = std::env::var("SEKV_KILLS").map_or(KILLS, |n| n.parse().unwrap());
    let mut random = common::Random(7);
    // Another process, this one, has files in the same folder all the time.
    let mut neighbour = World::new(params(&folder), 2);
    neighbour.extend(0, 120);
    let mut loaded = std::collections::BTreeSet::new();
    for kill in 0..kills {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["works_until_it_is_killed", "--exact", "--nocapture"])
            .env(WORK, &folder)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        // Wait until it has saved, then for a random moment more.
        let mut line = String::new();
        let out = child.stdout.take().unwrap();
        let mut out = std::io::BufReader::new(out);
        while !line.contains("saved") {
            line.clear();
            let n = std::io::BufRead::read_line(&mut out, &mut line).unwrap();
            assert!(n > 0, "the process ended by itself");
        }
        std::thread::sleep(Duration::from_micros(random.below(40_000) as u64));
        child.kill().unwrap();
        child.wait().unwrap();
        let mut context = new_context(&params(&folder));
        context.load_file(0, &folder.join("saved")).unwrap_or_else(|e| panic!("kill {kill}: {e}"));
        let n_tokens = context.statistics().n_tokens;
        assert_eq!(n_tokens % 25, 0);
        assert!(n_tokens > 0);
        loaded.insert(n_tokens);
        if neighbour.lists[0].len() > 400 {
            neighbour.remove(0, -1, -1);
        }
        neighbour.extend(0, 9);
        neighbour.check(ROUNDING, "a neighbour");
        Step::new(&mut random).attend(&mut context);
    }
    println!("{kills} kills; states of {loaded:?} tokens were loaded");
    // Nothing but what was saved is left behind, or a draft that got its name the moment before.
    let names: Vec<String> = std::fs::read_dir(&folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .collect();
    let drafts = names.iter().filter(|name| *name != "saved").count();
    assert!(drafts * 20 <= kills, "{names:?}");
    std::fs::remove_dir_all(folder).unwrap();
}
