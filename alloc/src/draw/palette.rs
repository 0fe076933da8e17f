//! The look of a role: one hue (after Okabe and Ito's colour-blind safe set) in a light and a dark theme, and one
//! letter.

use crate::Role;

/// The look of one role.
#[derive(Clone, Copy)]
pub(super) struct Look {
    /// Letter of the role in lower case; persistent tensors use the capital letter.
    pub(super) letter: char,
    /// `rrggbb` on a light ground.
    pub(super) light: u32,
    /// `rrggbb` on a dark ground.
    pub(super) dark: u32,
}

pub(super) fn look(role: Role) -> Look {
    let (letter, light, dark) = match role {
        Role::Parameter => ('p', 0x4189c4, 0x4a9bdb),
        Role::Gradient => ('g', 0xd0602b, 0xe5753f),
        Role::OptimizerState => ('o', 0xc07aa5, 0xcf8bb6),
        Role::Input => ('i', 0xe3d44a, 0xe8dc6a),
        Role::Activation => ('a', 0x2f9e7d, 0x35b08c),
        Role::Workspace => ('w', 0x8b929c, 0x7d8590),
        Role::Communication => ('c', 0x6fbce8, 0x86cdf2),
        Role::Routing => ('r', 0xe0a02e, 0xecb04a),
        Role::Cache => ('k', 0xb5536b, 0xcd6a82),
    };
    Look { letter, light, dark }
}
