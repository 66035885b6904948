//! Routing `paper`: the published method, whole (docs/architecture.md, "Routing paper").
//!
//! Tokens above a threshold of surprisal are anchors and stay whole on the fast tier; those between
//! two anchors are a span. Of a span the fast tier keeps its mean key and value and one routing
//! norm a query head, the slow tier a low-rank basis of its keys and values. A query head zooms the
//! spans whose gate exceeds its threshold; one softmax runs over whole tokens, coarse rows and
//! rebuilt tokens.
//!
//! The mathematics are in `segment`, `span`, `summary`, `basis` and `zoom`; here is what the cache
//! does with them. Keys are not centred.

mod attend;
mod demote;
mod piece;
mod placed;
mod plan;
mod remove;
mod route;
mod run;
mod save;
mod seal;
mod shift;
mod sizes;
mod tokens;
mod weights;

pub use tokens::PaperTokens;

use piece::Piece;
use placed::Placed;
use plan::PaperPlan;
use run::Run;
