//! Lines of CSV.

/// Returns the fields of a line, some of which may be quoted.
pub fn fields(line: &str) -> Vec<String> {
    let (mut fields, mut is_quoted) = (vec![String::new()], false);
    for letter in line.chars() {
        match letter {
            '"' => is_quoted = !is_quoted,
            ',' if !is_quoted => fields.push(String::new()),
            letter => fields.last_mut().expect("there is one").push(letter),
        }
    }
    fields
}
