//! Zooming: which spans a query head sees token by token, and with which gates.
//!
//! - [`gates`] weighs the directions of a span's basis (paper, "rank gates" g_phi).
//! - [`budget`] keeps the zoomed spans of a query head within a number of rows.
//! - [`rows`] lists what a query head attends, with the bias of each row.

pub mod budget;
pub mod gates;
pub mod rows;
