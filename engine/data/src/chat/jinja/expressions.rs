//! Parses expressions, by Jinja's grammar.

use std::sync::Arc;

use super::ast::{Arguments, Comparison, Expr, Operator};
use super::lexer::TokenKind;
use super::limits::{Fault, NESTING, Outcome, PARAMETERS};
use super::parser::Parser;
use super::{filters, tests};

impl Parser {
    /// Parses an expression, or a tuple of several expressions separated by commas.
    pub(super) fn tuple(&mut self, with_condition: bool) -> Outcome<Expr> {
        let (mut items, mut is_tuple, mut height) = (Vec::new(), false, 0);
        loop {
            if matches!(self.kind(), TokenKind::VariableEnd | TokenKind::BlockEnd) || self.is_sign(")") {
                break;
            }
            items.push(self.expression(with_condition)?);
            height = height.max(self.height);
            if !self.take_sign(",") {
                break;
            }
            is_tuple = true;
        }
        match (is_tuple, items.len()) {
            (false, 1) => Ok(items.remove(0)),
            (false, _) => self.unexpected("an expression"),
            (true, _) => {
                self.above(height)?;
                Ok(Expr::Tuple(items))
            }
        }
    }

    pub(super) fn expression(&mut self, with_condition: bool) -> Outcome<Expr> {
        self.deeper(|parser| {
            let unknown = parser.unknown.len();
            let mut value = parser.binary(0)?;
            while with_condition && parser.take_word("if") {
                let mut height = parser.height;
                let condition = parser.binary(0)?;
                height = height.max(parser.height);
                let otherwise = match parser.take_word("else") {
                    true => Some(Box::new(parser.expression(true)?)),
                    false => None,
                };
                parser.above(height.max(parser.height))?;
                parser.unknown.truncate(unknown);
                value = Expr::If(Box::new(condition), Box::new(value), otherwise);
            }
            Ok(value)
        })
    }

    /// Sets the height of a node from the height of its children. It is an error if the node is nested too deeply.
    fn above(&mut self, height: usize) -> Outcome<()> {
        self.height = height + 1;
        if height >= NESTING {
            return self.fail(format!("more than {NESTING} operators, filters or calls are chained"));
        }
        Ok(())
    }

    /// Parses binary operators by level of precedence: `or`, `and`, `not`, comparisons, sums, `~`, products, powers.
    fn binary(&mut self, level: usize) -> Outcome<Expr> {
        match level {
            2 if self.take_word("not") => {
                let value = Box::new(self.deeper(|parser| parser.binary(2))?);
                self.above(self.height)?;
                Ok(Expr::Not(value))
            }
            2 => self.binary(3),
            3 => self.comparison(),
            5 => self.concat(),
            8 => self.unary(true),
            _ => {
                let mut left = self.binary(level + 1)?;
                let mut height = self.height;
                while let Some(operator) = self.operator(level) {
                    let right = Box::new(self.binary(level + 1)?);
                    self.above(height.max(self.height))?;
                    height = self.height;
                    left = match operator {
                        None if level == 0 => Expr::Or(Box::new(left), right),
                        None => Expr::And(Box::new(left), right),
                        Some(operator) => Expr::Binary(operator, Box::new(left), right),
                    };
                }
                Ok(left)
            }
        }
    }

    /// Takes an operator of a level. Returns `None` if the next token is not such an operator. On the first two levels,
    /// `or` and `and`, the result is `Some(None)`, because they are not values of [`Operator`].
    fn operator(&mut self, level: usize) -> Option<Option<Operator>> {
        let signs: &[(&str, Operator)] = match level {
            0 => return self.take_word("or").then_some(None),
            1 => return self.take_word("and").then_some(None),
            4 => &[("+", Operator::Add), ("-", Operator::Sub)],
            6 => &[("*", Operator::Mul), ("/", Operator::Div), ("//", Operator::FloorDiv), ("%", Operator::Mod)],
            _ => &[("**", Operator::Pow)],
        };
        let (_, operator) = signs.iter().find(|(sign, _)| self.is_sign(sign))?;
        self.at += 1;
        Some(Some(*operator))
    }

    fn comparison(&mut self) -> Outcome<Expr> {
        let first = self.binary(4)?;
        let mut others = Vec::new();
        let mut height = self.height;
        loop {
            let comparison = match self.kind() {
                TokenKind::Sign("==") => Comparison::Eq,
                TokenKind::Sign("!=") => Comparison::Ne,
                TokenKind::Sign("<") => Comparison::Lt,
                TokenKind::Sign("<=") => Comparison::Le,
                TokenKind::Sign(">") => Comparison::Gt,
                TokenKind::Sign(">=") => Comparison::Ge,
                _ if self.is_word("in") => Comparison::In,
                _ if self.is_word("not") && self.is_word_next("in") => {
                    self.at += 1;
                    Comparison::NotIn
                }
                _ if others.is_empty() => return Ok(first),
                _ => {
                    self.above(height)?;
                    return Ok(Expr::Compare(Box::new(first), others));
                }
            };
            self.at += 1;
            others.push((comparison, self.binary(4)?));
            height = height.max(self.height);
        }
    }

    fn concat(&mut self) -> Outcome<Expr> {
        let mut parts = vec![self.binary(6)?];
        let mut height = self.height;
        while self.take_sign("~") {
            parts.push(self.binary(6)?);
            height = height.max(self.height);
        }
        if parts.len() == 1 {
            return Ok(parts.remove(0));
        }
        self.above(height)?;
        Ok(Expr::Concat(parts))
    }

    fn unary(&mut self, with_filters: bool) -> Outcome<Expr> {
        let is_negative = self.is_sign("-");
        let value = if is_negative || self.is_sign("+") {
            self.at += 1;
            let value = Box::new(self.deeper(|parser| parser.unary(false))?);
            self.above(self.height)?;
            if is_negative { Expr::Negative(value) } else { Expr::Positive(value) }
        } else {
            self.height = 0;
            self.primary()?
        };
        let value = self.postfix(value)?;
        if with_filters { self.filters(value, false) } else { Ok(value) }
    }

    fn primary(&mut self) -> Outcome<Expr> {
        match self.kind().clone() {
            TokenKind::Name(name) => {
                self.at += 1;
                let uses = self.uses.last_mut().expect("the template's own is never popped");
                uses.varargs |= &*name == "varargs";
                uses.kwargs |= &*name == "kwargs";
                uses.caller |= &*name == "caller";
                Ok(match &*name {
                    "true" | "True" => Expr::Bool(true),
                    "false" | "False" => Expr::Bool(false),
                    "none" | "None" => Expr::None,
                    _ => Expr::Name(name),
                })
            }
            TokenKind::Str(mut text) => {
                self.at += 1;
                while let TokenKind::Str(more) = self.kind() {
                    text.push_str(more);
                    self.at += 1;
                }
                Ok(Expr::Str(text.into()))
            }
            TokenKind::Int(value) => {
                self.at += 1;
                Ok(Expr::Int(value))
            }
            TokenKind::Float(value) => {
                self.at += 1;
                Ok(Expr::Float(value))
            }
            TokenKind::Sign("(") => {
                self.at += 1;
                if self.take_sign(")") {
                    return Ok(Expr::Tuple(Vec::new()));
                }
                let value = self.tuple(true)?;
                self.sign(")")?;
                Ok(value)
            }
            TokenKind::Sign("[") => {
                self.at += 1;
                let items = self.separated("]", |parser| parser.expression(true))?;
                self.above(self.height)?;
                Ok(Expr::List(items))
            }
            TokenKind::Sign("{") => {
                self.at += 1;
                let entry = |parser: &mut Self| {
                    let key = parser.expression(true)?;
                    let height = parser.height;
                    parser.sign(":")?;
                    let value = parser.expression(true)?;
                    parser.height = height.max(parser.height);
                    Ok((key, value))
                };
                let entries = self.separated("}", entry)?;
                self.above(self.height)?;
                Ok(Expr::Dict(entries))
            }
            _ => self.unexpected("an expression"),
        }
    }

    /// Parses elements separated by commas, up to and including the closing bracket `end`. The height is then that of
    /// the highest element.
    fn separated<T>(&mut self, end: &str, mut parse: impl FnMut(&mut Self) -> Outcome<T>) -> Outcome<Vec<T>> {
        let (mut items, mut height) = (Vec::new(), 0);
        while !self.take_sign(end) {
            if !items.is_empty() {
                self.sign(",")?;
                if self.take_sign(end) {
                    break;
                }
            }
            items.push(parse(self)?);
            height = height.max(self.height);
        }
        self.height = height;
        Ok(items)
    }

    /// Parses attributes, items and calls after a value.
    fn postfix(&mut self, mut value: Expr) -> Outcome<Expr> {
        loop {
            let height = std::mem::take(&mut self.height);
            value = if self.take_sign(".") {
                match self.next() {
                    TokenKind::Name(name) => Expr::Attribute(Box::new(value), name),
                    TokenKind::Int(index) => Expr::Item(Box::new(value), Box::new(Expr::Int(index))),
                    _ => return self.unexpected("a name or a number after the dot"),
                }
            } else if self.take_sign("[") {
                let mut items = self.separated("]", Self::subscript)?;
                let item = if items.len() == 1 { items.remove(0) } else { Expr::Tuple(items) };
                Expr::Item(Box::new(value), Box::new(item))
            } else if self.is_sign("(") {
                Expr::Call(Box::new(value), Box::new(self.arguments()?))
            } else {
                self.height = height;
                return Ok(value);
            };
            self.above(height.max(self.height))?;
        }
    }

    fn subscript(&mut self) -> Outcome<Expr> {
        let mut parts = [None, None, None];
        let (mut index, mut height) = (0, 0);
        loop {
            if self.is_sign(":") {
                index += 1;
                if index > 2 {
                    return self.unexpected("]");
                }
                self.at += 1;
            } else if self.is_sign("]") || self.is_sign(",") {
                break;
            } else if parts[index].is_none() {
                parts[index] = Some(self.expression(true)?);
                height = height.max(self.height);
            } else {
                return self.unexpected("]");
            }
        }
        self.height = height;
        match (index, parts) {
            (0, [Some(item), ..]) => Ok(item),
            (0, _) => self.unexpected("an index"),
            (_, parts) => Ok(Expr::Slice(Box::new(parts))),
        }
    }

    fn arguments(&mut self) -> Outcome<Arguments> {
        self.sign("(")?;
        let mut arguments = Arguments::default();
        self.separated(")", |parser| {
            let is_named = matches!(parser.kind(), TokenKind::Name(_))
                && parser.tokens.get(parser.at + 1).is_some_and(|token| token.kind == TokenKind::Sign("="));
            let has_rest = arguments.rest.is_some() || arguments.named_rest.is_some();
            if parser.is_sign("**") && arguments.named_rest.is_none() {
                parser.at += 1;
                arguments.named_rest = Some(Box::new(parser.expression(true)?));
            } else if parser.is_sign("*") && !has_rest {
                parser.at += 1;
                arguments.rest = Some(Box::new(parser.expression(true)?));
            } else if is_named && arguments.named_rest.is_none() {
                let name = parser.name()?;
                parser.at += 1;
                if arguments.named.iter().any(|(other, _)| *other == name) {
                    return parser.fail(format!("the argument {name} is given twice"));
                }
                arguments.named.push((name, parser.expression(true)?));
                if arguments.named.len() > PARAMETERS {
                    return parser.fail(format!("a call has more than {PARAMETERS} named arguments"));
                }
            } else if !is_named && !has_rest && arguments.named.is_empty() {
                arguments.positional.push(parser.expression(true)?);
            } else {
                return parser
                    .fail("arguments are in the wrong order; write plain ones first, then named ones, then * and **");
            }
            Ok(())
        })?;
        Ok(arguments)
    }

    /// Parses filters, tests and calls after a value. If `inline`, the first filter has no `|` before it.
    pub(super) fn filters(&mut self, mut value: Expr, mut inline: bool) -> Outcome<Expr> {
        let is_captured = matches!(value, Expr::Captured);
        if is_captured {
            self.height = 0;
        }
        loop {
            let height = std::mem::take(&mut self.height);
            value = if inline || self.take_sign("|") {
                inline = false;
                let name = self.dotted()?;
                if !filters::is_known(&name) {
                    self.note_unknown(format!("no filter named '{name}'"));
                }
                let arguments = if self.is_sign("(") { self.arguments()? } else { Arguments::default() };
                Expr::Filter(Box::new(value), name, Box::new(arguments))
            } else if !is_captured && self.take_word("is") {
                self.test(value)?
            } else if !is_captured && self.is_sign("(") {
                Expr::Call(Box::new(value), Box::new(self.arguments()?))
            } else {
                self.height = height;
                return Ok(value);
            };
            self.above(height.max(self.height))?;
        }
    }

    fn note_unknown(&mut self, reason: String) {
        if !self.is_soft {
            self.unknown.push(Fault { reason, line: Some(self.tokens[self.at].line) });
        }
    }

    fn dotted(&mut self) -> Outcome<Arc<str>> {
        let mut name = self.name()?;
        while self.take_sign(".") {
            name = format!("{name}.{}", self.name()?).into();
        }
        Ok(name)
    }

    fn test(&mut self, value: Expr) -> Outcome<Expr> {
        let is_negated = self.take_word("not");
        let name = self.dotted()?;
        if !tests::is_known(&name) {
            self.note_unknown(format!("no test named '{name}'"));
        }
        let ends = ["else", "or", "and"].iter().any(|word| self.is_word(word));
        let starts = match self.kind() {
            TokenKind::Name(_) => !ends,
            TokenKind::Str(_) | TokenKind::Int(_) | TokenKind::Float(_) | TokenKind::Sign("[" | "{") => true,
            _ => false,
        };
        let arguments = if self.is_sign("(") {
            self.arguments()?
        } else if starts {
            if self.is_word("is") {
                return self.fail("tests cannot be chained with is");
            }
            self.height = 0;
            let argument = self.primary()?;
            Arguments { positional: vec![self.postfix(argument)?], ..Arguments::default() }
        } else {
            Arguments::default()
        };
        let test = Expr::Test(Box::new(value), name, Box::new(arguments));
        Ok(if is_negated { Expr::Not(Box::new(test)) } else { test })
    }
}
