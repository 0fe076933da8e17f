//! Relates the dimensions of a node's operands by the rule of its operation.

use std::collections::HashMap;

use super::dims::{Dim, Dims};
use crate::rule::Rule;

/// The statement of a rule about a node.
#[derive(Debug, Default)]
pub struct Related {
    /// The dimensions that the rule names.
    pub labels: Vec<Label>,
    /// For each output, the inputs that it depends on; `None` stands for all.
    pub reads: Vec<Option<Vec<usize>>>,
}

/// A dimension that a rule names, and whether it must be whole.
#[derive(Debug, Clone, Copy)]
pub struct Label {
    pub dim: Dim,
    pub is_whole: bool,
    /// True if a rank may hold a single range only.
    pub is_range: bool,
}

#[derive(Debug, Clone, PartialEq)]
enum Term {
    Rest,
    Label(char),
    Range(char),
    Product(Vec<Term>),
    Alone,
}

fn terms(text: &str) -> Result<Vec<Term>, String> {
    let (mut terms, mut outer) = (Vec::new(), None);
    for c in text.chars() {
        match c {
            ' ' => {}
            '*' => terms.push(Term::Rest),
            '_' => terms.push(Term::Alone),
            '(' if outer.is_none() => outer = Some(std::mem::take(&mut terms)),
            ')' => {
                let before = outer.take().ok_or("a parenthesis is closed twice")?;
                let product = std::mem::replace(&mut terms, before);
                terms.push(Term::Product(product));
            }
            '\'' => match terms.pop() {
                Some(Term::Label(label)) => terms.push(Term::Range(label)),
                _ => return Err("' belongs behind a letter".into()),
            },
            c if c.is_alphabetic() => terms.push(Term::Label(c)),
            other => return Err(format!("{other:?} has no meaning in a rule")),
        }
    }
    Ok(terms)
}

/// Separates the inputs that an output depends on from its dimensions.
fn reads(text: &str) -> Result<(&str, Option<Vec<usize>>), String> {
    let Some((text, list)) = text.split_once('[') else { return Ok((text, None)) };
    let digits = list.trim_end().strip_suffix(']').ok_or("a bracket is not closed")?;
    let indices: Option<Vec<usize>> = digits.chars().map(|c| c.to_digit(10).map(|digit| digit as usize)).collect();
    Ok((text, Some(indices.ok_or("brackets hold the indices of inputs")?)))
}

/// The dimensions that the labels of a rule stand for.
#[derive(Default)]
struct Bound {
    labels: HashMap<char, Dim>,
    rest: Option<Vec<Dim>>,
    alone: Vec<Dim>,
    ranges: Vec<Dim>,
    products: Vec<(Vec<Term>, Dim)>,
}

impl Bound {
    fn bind(&mut self, dims: &mut Dims, text: &str, operand: &[Dim]) -> Result<(), String> {
        let terms = terms(text)?;
        let named = terms.iter().filter(|&term| *term != Term::Rest).count();
        let count = match terms.len() - named {
            0 if operand.len() == named => 0,
            1 if operand.len() >= named => operand.len() - named,
            _ => return Err(format!("{text:?} does not fit {} dimensions", operand.len())),
        };
        let mut rest = operand;
        for term in terms {
            let taken = if term == Term::Rest { count } else { 1 };
            let (these, behind) = rest.split_at(taken);
            rest = behind;
            if let Term::Range(_) = term {
                self.ranges.push(these[0]);
            }
            match term {
                Term::Rest => self.bind_rest(dims, these)?,
                Term::Label(label) | Term::Range(label) => match self.labels.get(&label) {
                    Some(&dim) if dims.extent(dim) == dims.extent(these[0]) => dims.unify(dim, these[0]),
                    Some(&dim) => {
                        return Err(format!("{label:?} is {} and {}", dims.extent(dim), dims.extent(these[0])));
                    }
                    None => _ = self.labels.insert(label, these[0]),
                },
                Term::Product(factors) => self.products.push((factors, these[0])),
                Term::Alone => self.alone.push(these[0]),
            }
        }
        Ok(())
    }

    fn bind_rest(&mut self, dims: &mut Dims, these: &[Dim]) -> Result<(), String> {
        let Some(rest) = &self.rest else {
            self.rest = Some(these.to_vec());
            return Ok(());
        };
        let extents = |list: &[Dim]| -> Vec<usize> { list.iter().map(|&dim| dims.extent(dim)).collect() };
        if extents(rest) != extents(these) {
            return Err(format!("* is {:?} and {:?}", extents(rest), extents(these)));
        }
        for (&a, &b) in rest.iter().zip(these) {
            dims.unify(a, b);
        }
        Ok(())
    }

    /// Relates the products to their factors, of which one may be new. A product with several new factors waits for others
    /// that name them.
    fn multiply(&mut self, dims: &mut Dims) -> Result<(), String> {
        let mut products = std::mem::take(&mut self.products);
        while !products.is_empty() {
            let is_new = |term: &&Term| matches!(term, Term::Label(label) if !self.labels.contains_key(label));
            let next = products.iter().position(|(factors, _)| factors.iter().filter(is_new).count() <= 1);
            let (factors, dim) = products.remove(next.unwrap_or(0));
            let known = |term: &Term| match term {
                Term::Label(label) => self.labels.get(label).map(|&dim| vec![dim]),
                Term::Rest => self.rest.clone(),
                _ => None,
            };
            let known: Vec<Option<Vec<Dim>>> = factors.iter().map(known).collect();
            let product: usize = known.iter().flatten().flatten().map(|&dim| dims.extent(dim)).product();
            let extent = dims.extent(dim);
            let unknown: Vec<&Term> = factors.iter().zip(&known).filter(|(_, k)| k.is_none()).map(|(t, _)| t).collect();
            let new = match unknown[..] {
                [] if product == extent => None,
                [&Term::Label(label)] if extent.is_multiple_of(product) => {
                    let new = dims.leaf(extent / product);
                    self.labels.insert(label, new);
                    Some(new)
                }
                _ => return Err(format!("a product of {extent} does not have these factors")),
            };
            let all: Vec<Dim> =
                known.into_iter().flat_map(|k| k.unwrap_or_else(|| new.into_iter().collect())).collect();
            dims.reshape(&[dim], &all);
        }
        Ok(())
    }
}

impl Rule {
    /// Relates the dimensions of a node's operands. Returns those that the rule names.
    ///
    /// # Errors
    /// Returns the reason why the rule does not fit the operands.
    pub(super) fn relate(&self, dims: &mut Dims, inputs: &[&[Dim]], outputs: &[&[Dim]]) -> Result<Related, String> {
        match self {
            Self::Labels(text) => {
                let (left, right) = text.split_once("->").ok_or("a rule needs an arrow")?;
                let (mut bound, mut related) = (Bound::default(), Related::default());
                for (text, operands) in [(left, inputs), (right, outputs)] {
                    let texts: Vec<&str> = text.split(',').collect();
                    if texts.len() != operands.len() {
                        return Err(format!("{text:?} names {} of {} operands", texts.len(), operands.len()));
                    }
                    related.reads.clear();
                    for (text, operand) in texts.iter().zip(operands) {
                        let (text, inputs) = reads(text)?;
                        bound.bind(dims, text, operand)?;
                        related.reads.push(inputs);
                    }
                }
                bound.multiply(dims)?;
                let is_range = |dim: &Dim| bound.ranges.contains(dim);
                let label = |&dim: &Dim, is_whole| Label { dim, is_whole, is_range: is_range(&dim) };
                let named = bound.labels.iter().map(|(letter, dim)| label(dim, letter.is_uppercase()));
                let rest = bound.rest.iter().flatten().map(|dim| label(dim, false));
                let alone = bound.alone.iter().map(|dim| label(dim, true));
                related.labels = named.chain(rest).chain(alone).collect();
                Ok(related)
            }
            Self::Reshape => {
                dims.reshape(inputs[0], outputs[0]);
                Ok(Related::default())
            }
            &Self::Narrow { dim, start } => {
                range(dims, dim, start, inputs[0], outputs[0]);
                // Where ranks split indices outside the range, the output is equal on all.
                Ok(Related { reads: vec![Some(Vec::new())], ..Related::default() })
            }
            &Self::Widen { dim, start } => {
                range(dims, dim, start, outputs[0], inputs[0]);
                Ok(Related::default())
            }
            &Self::Cat { dim } => {
                let extents: Vec<usize> = inputs.iter().map(|input| dims.extent(input[dim])).collect();
                let segments = dims.cut(outputs[0][dim], &extents);
                for (input, segment) in inputs.iter().zip(segments) {
                    let others = (0..input.len()).filter(|&other| other != dim);
                    others.for_each(|other| dims.unify(input[other], outputs[0][other]));
                    dims.unify(input[dim], segment);
                }
                Ok(Related::default())
            }
        }
    }
}

/// Relates a tensor and a range of one of its dimensions.
fn range(dims: &mut Dims, dim: usize, start: usize, wide: &[Dim], narrow: &[Dim]) {
    let (extent, len) = (dims.extent(wide[dim]), dims.extent(narrow[dim]));
    let extents: Vec<usize> = [start, len, extent - start - len].into_iter().filter(|&extent| extent > 0).collect();
    let segments = dims.cut(wide[dim], &extents);
    dims.unify(segments[usize::from(start > 0)], narrow[dim]);
    for other in (0..wide.len()).filter(|&other| other != dim) {
        dims.unify(wide[other], narrow[other]);
    }
}
