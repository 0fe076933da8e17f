//! A template's syntax tree.

use std::sync::Arc;

/// A statement, and its line.
#[derive(Debug)]
pub(crate) struct Statement {
    pub line: u32,
    pub kind: Kind,
}

/// Statements.
pub(crate) type Body = Vec<Statement>;

/// The kinds of statements.
#[derive(Debug)]
pub(crate) enum Kind {
    Text(Arc<str>),
    Print(Expr),
    For(Arc<For>),
    /// Pairs of a condition and a body, and the body after `else`.
    If(Vec<(Expr, Body)>, Body),
    Set(Target, Expr),
    /// A target, an optional filter over [`Expr::Captured`], and the captured body.
    SetBlock(Target, Option<Expr>, Body),
    Macro(Arc<MacroNode>),
    /// A call, and the body that is passed to it as `caller`.
    Call(Expr, Arc<MacroNode>),
    /// Filters over [`Expr::Captured`], and the captured body.
    Filter(Expr, Body),
    With(Vec<(Target, Expr)>, Body),
    /// A named block. It is rendered where it is defined, because no other template extends a chat template. Unless the
    /// block is scoped, it only sees the variables of the template itself.
    Block {
        is_scoped: bool,
        body: Body,
    },
    Generation(Body),
    Break,
    Continue,
}

/// A loop.
#[derive(Debug)]
pub(crate) struct For {
    pub target: Target,
    pub over: Expr,
    pub condition: Option<Expr>,
    pub is_recursive: bool,
    pub body: Body,
    pub otherwise: Body,
}

/// A macro, or the body of a call block.
#[derive(Debug)]
pub(crate) struct MacroNode {
    pub name: Arc<str>,
    /// Parameters with their optional defaults.
    pub parameters: Vec<(Arc<str>, Option<Expr>)>,
    pub body: Body,
    pub uses: Uses,
}

/// The special variables that Jinja passes to a macro only if its body uses them.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Uses {
    pub varargs: bool,
    pub kwargs: bool,
    pub caller: bool,
}

/// The target of an assignment.
#[derive(Debug)]
pub(crate) enum Target {
    Name(Arc<str>),
    /// An attribute of a namespace.
    Attribute(Arc<str>, Arc<str>),
    Tuple(Vec<Target>),
}

/// Arguments of a call.
#[derive(Debug, Default)]
pub(crate) struct Arguments {
    pub positional: Vec<Expr>,
    pub named: Vec<(Arc<str>, Expr)>,
    /// `*sequence`.
    pub rest: Option<Box<Expr>>,
    /// `**mapping`.
    pub named_rest: Option<Box<Expr>>,
}

/// An expression.
#[derive(Debug)]
pub(crate) enum Expr {
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Str(Arc<str>),
    Name(Arc<str>),
    List(Vec<Expr>),
    Tuple(Vec<Expr>),
    Dict(Vec<(Expr, Expr)>),
    Attribute(Box<Expr>, Arc<str>),
    Item(Box<Expr>, Box<Expr>),
    Slice(Box<[Option<Expr>; 3]>),
    Call(Box<Expr>, Box<Arguments>),
    Filter(Box<Expr>, Arc<str>, Box<Arguments>),
    Test(Box<Expr>, Arc<str>, Box<Arguments>),
    /// The captured text of a filter block or a set block.
    Captured,
    Not(Box<Expr>),
    Negative(Box<Expr>),
    Positive(Box<Expr>),
    And(Box<Expr>, Box<Expr>),
    Or(Box<Expr>, Box<Expr>),
    Binary(Operator, Box<Expr>, Box<Expr>),
    Concat(Vec<Expr>),
    Compare(Box<Expr>, Vec<(Comparison, Expr)>),
    /// The condition, the value if it is true, and the value if it is false.
    If(Box<Expr>, Box<Expr>, Option<Box<Expr>>),
}

/// An arithmetic operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Operator {
    Add,
    Sub,
    Mul,
    Div,
    FloorDiv,
    Mod,
    Pow,
}

/// A comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Comparison {
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
    In,
    NotIn,
}
