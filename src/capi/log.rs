//! Log lines: what a host should know and no status tells.

use std::ffi::{CString, c_char, c_void};

use super::status::c_text;
use crate::cache::Context;
use crate::routing::RoutingReport;

/// How much a log line matters.
#[repr(C)]
#[derive(Clone, Copy)]
pub enum sekv_log_level {
    SEKV_LOG_INFO = 1,
    /// A fallback was taken.
    SEKV_LOG_WARNING = 2,
    /// Work failed without failing a call, such as sealing; the cache goes on.
    SEKV_LOG_ERROR = 3,
}

/// Gets log lines: a sekv_log_level, one line without a newline that lasts during the call, and
/// what was given to sekv_set_log_callback.
pub type sekv_log_callback =
    Option<unsafe extern "C" fn(level: i32, text: *const c_char, user: *mut c_void)>;

pub(super) type Entries = Vec<(sekv_log_level, CString)>;

/// Who gets log lines, and what they were told.
#[derive(Default)]
pub(super) struct Log {
    target: Option<Target>,
    told: RoutingReport,
}

#[derive(Clone, Copy)]
pub(super) struct Target {
    callback: unsafe extern "C" fn(i32, *const c_char, *mut c_void),
    user: *mut c_void,
}

// SAFETY: the host gave `user` for the calls of whichever thread uses the context.
unsafe impl Send for Target {}

impl Target {
    pub fn write(self, entries: &Entries) {
        for (level, text) in entries {
            // SAFETY: the host's function, called as its type says.
            unsafe { (self.callback)(*level as i32, text.as_ptr(), self.user) };
        }
    }
}

impl Log {
    pub fn set(&mut self, callback: sekv_log_callback, user: *mut c_void) {
        self.target = callback.map(|callback| Target { callback, user });
    }

    pub fn target(&self) -> Option<Target> {
        self.target
    }

    /// The lines of the call that ends; fallbacks are told between passes. Events are taken also
    /// where nobody listens, so that they don't pile up.
    pub fn collect(&mut self, cache: &mut Context) -> Entries {
        let events = cache.take_events();
        if self.target.is_none() {
            return Vec::new();
        }
        let mut entries = Entries::new();
        for event in events {
            entries.push((sekv_log_level::SEKV_LOG_ERROR, c_text(&event.message)));
        }
        if cache.pass_tokens().is_some() {
            return entries;
        }
        let report = cache.report();
        for line in news(&self.told, &report) {
            entries.push((sekv_log_level::SEKV_LOG_WARNING, c_text(&line)));
        }
        self.told = report;
        entries
    }
}

/// Fallbacks that are in `now` and were not in `before`.
fn news(before: &RoutingReport, now: &RoutingReport) -> Vec<String> {
    let mut lines = Vec::new();
    let mut count = |before: u64, now: u64, what: &str| {
        if now > before {
            lines.push(format!("{} {what}", now - before));
        }
    };
    let repacked = "blocks were given smaller sketches, because the fast tier's budget is short";
    count(before.repacked_blocks, now.repacked_blocks, repacked);
    let demoted = "anchors became ordinary tokens, because the fast tier's budget is short";
    count(before.demoted_anchors, now.demoted_anchors, demoted);
    let fixed = "tokens were cut into spans of fixed length, because they have no surprisal";
    count(before.tokens_without_surprisal, now.tokens_without_surprisal, fixed);
    if before.dense_layers.len() > now.dense_layers.len() && now.spans >= before.spans {
        let n = before.dense_layers.len() - now.dense_layers.len();
        lines.push(format!("{n} dense layers were sealed"));
    }
    if now.layout_without_queries && !before.layout_without_queries {
        lines.push("a sketch's layout was chosen without having seen a query".to_owned());
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fallbacks_are_told_once() {
        let before = RoutingReport { repacked_blocks: 2, ..Default::default() };
        let now =
            RoutingReport { repacked_blocks: 5, layout_without_queries: true, ..before.clone() };
        let lines = news(&before, &now);
        assert_eq!(lines.len(), 2);
        assert!(lines[0].starts_with("3 blocks"), "{lines:?}");
        assert_eq!(news(&now, &now), Vec::<String>::new());
    }
}
