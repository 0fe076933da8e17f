//! One HTML page: style, script and data inside, nothing fetched.
//!
//! In: what is on the page. Out: the page, with the style and the plots that all pages of this crate have. Never: a word of its data
//! that the browser could take for more than data.

use gapless_alloc::draw::{THEME, escape};
use serde::Serialize;

/// The parts of a page.
pub(crate) struct Page<'a> {
    pub title: &'a str,
    /// What the title is of.
    pub kind: &'a str,
    /// Behind what all pages have.
    pub style: &'a str,
    /// HTML.
    pub body: &'a str,
    /// Behind what all pages have.
    pub script: &'a str,
    /// What [`json`] returns; the script reads it from the element `data`.
    pub data: &'a str,
    /// Whether it may ask the server that it comes from; otherwise it may ask nobody.
    pub is_served: bool,
}

impl Page<'_> {
    pub fn html(&self) -> String {
        let style = [THEME, include_str!("assets/page.css"), self.style].concat();
        let script = [include_str!("assets/plot.js"), self.script].concat();
        let parts = [
            ("{sources}", if self.is_served { "; connect-src 'self'" } else { "" }),
            ("{title}", &*escape(self.title)),
            ("{kind}", self.kind),
            ("{style}", &style),
            ("{body}", self.body),
            ("{data}", self.data),
            ("{script}", &script),
        ];
        filled(include_str!("assets/page.html"), &parts)
    }
}

/// A value for an element of data: within a script element only `<` can end it, and as an escape it is the same JSON.
pub(crate) fn json(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("strings and numbers are always JSON").replace('<', "\\u003c")
}

/// The template with each part once, in its order. What stands in a part is not looked at.
fn filled(template: &str, parts: &[(&str, &str)]) -> String {
    let mut page = String::with_capacity(template.len() + parts.iter().map(|(_, text)| text.len()).sum::<usize>());
    let mut rest = template;
    for (name, text) in parts {
        let (before, behind) = rest.split_once(name).expect("the template has every part, in this order");
        page.extend([before, text]);
        rest = behind;
    }
    page + rest
}
