//! Tests of the split, of folders that are reused or damaged, and of ids without text.

use std::fs;

use super::folder::{MANIFEST, TOKENS};
use super::*;
use crate::TokenWidth;

/// Documents that differ by their letter.
fn lettered(count: usize) -> Corpus {
    Corpus::from_texts((0..count).map(|index| char::from(b'a' + index as u8).to_string().repeat(20)))
}

fn options(folder: &Path, vocabulary: VocabularyChoice, validation_every: usize) -> DataOptions {
    DataOptions { vocabulary, validation_every, cache: folder.join("cache"), ..DataOptions::default() }
}

/// All tokens of a range, as text.
fn text_of(dataset: &Dataset, range: &Range<u64>) -> String {
    let mut ids = vec![0; (range.end - range.start) as usize];
    dataset.parts[0].tokens.read(range.start, &mut ids).unwrap();
    dataset.vocabulary.decode(&ids).unwrap()
}

#[test]
fn every_nth_document_or_the_tail_is_validation() {
    let folder = tempfile::tempdir().unwrap();
    let check = |documents, every, letters: &str, tokens| {
        let options = options(folder.path(), VocabularyChoice::Bytes, every);
        let dataset = Dataset::from_corpus(&lettered(documents), &options).unwrap();
        let mut text = text_of(&dataset, &dataset.parts[0].validation).replace('\0', "").chars().collect::<Vec<_>>();
        text.dedup();
        assert_eq!((text.into_iter().collect::<String>().as_str(), dataset.validation_tokens()), (letters, tokens));
        assert_eq!(dataset.training_tokens() + tokens, 21 * documents as u64);
    };
    check(7, 3, "cf", 42);
    check(3, 3, "c", 21);
    check(2, 3, "b", 14);
    check(1, 10, "a", 2);
    check(5, 0, "", 0);
    check(4, 1, "bd", 42);
}

#[test]
fn what_is_kept_is_used_and_what_is_damaged_is_made_again() {
    let folder = tempfile::tempdir().unwrap();
    let corpus = lettered(9);
    let options = options(folder.path(), VocabularyChoice::Bpe { size: 280 }, 4);
    let first = Dataset::from_corpus(&corpus, &options).unwrap();
    let kept = first.folder().unwrap().to_owned();
    let modified = |name: &str| fs::metadata(kept.join(name)).unwrap().modified().unwrap();
    let before = (modified(TOKENS), modified(MANIFEST));
    let again = Dataset::from_corpus(&corpus, &options).unwrap();
    assert_eq!(again.hash(), first.hash());
    assert_eq!((modified(TOKENS), modified(MANIFEST)), before);

    for name in [TOKENIZER, TOKENS, MANIFEST] {
        let path = kept.join(name);
        let whole = fs::read(&path).unwrap();
        let mut flipped = whole.clone();
        flipped[whole.len() / 2] ^= 1;
        let shorter = &whole[..whole.len() - 2];
        for damaged in [flipped.as_slice(), shorter, b""] {
            fs::write(&path, damaged).unwrap();
            let error = Dataset::open_prepared(&kept).err().map(|error| error.to_string());
            // A flip in the manifest may hit a field that is only reported, such as the number of files.
            assert!(name == MANIFEST || error.is_some_and(|error| error.contains("is damaged")), "{name}");
            assert_eq!(Dataset::from_corpus(&corpus, &options).unwrap().hash(), first.hash(), "{name}");
            assert_eq!(Dataset::open_prepared(&kept).unwrap().hash(), first.hash());
        }
    }
    let split_otherwise = DataOptions { validation_every: 3, ..options };
    let other = Dataset::from_corpus(&corpus, &split_otherwise).unwrap();
    assert_ne!(other.hash(), first.hash());
    assert_eq!(other.vocabulary().hash(), first.vocabulary().hash());
    assert_eq!(Dataset::open_prepared(&kept).unwrap().hash(), first.hash(), "the other has a folder of its own");
}

#[test]
fn token_ids_and_their_vocabulary() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ids.bin");
    let prepare = |ids: &[u16], vocabulary| {
        fs::write(&path, ids.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<_>>()).unwrap();
        Dataset::prepare(&Source::Path(path.clone()), &options(folder.path(), vocabulary, 10))
    };
    let ids: Vec<u16> = (0..300).collect();
    let bare = prepare(&ids, VocabularyChoice::Bpe { size: 300 }).unwrap();
    assert_eq!((bare.training_tokens(), bare.validation_tokens(), bare.vocabulary().size()), (270, 30, 300));
    assert_eq!(text_of(&bare, &(298..300)), "298 299");

    let message = |result: Result<Dataset, DataError>| result.unwrap_err().to_string();
    let outside = message(prepare(&ids, VocabularyChoice::Bpe { size: 299 }));
    assert!(outside.contains("token 299 at position 299 is outside the vocabulary of 299"), "{outside}");
    assert!(message(prepare(&ids, VocabularyChoice::Bytes)).contains("token 256 at position 256"));
    assert!(message(prepare(&[], VocabularyChoice::Bytes)).contains("no text in"));

    let trained = Vocabulary::train(["some text"].into_iter(), 260).unwrap();
    trained.save(&folder.path().join(TOKENIZER)).unwrap();
    assert!(message(prepare(&ids, VocabularyChoice::Bpe { size: 4096 })).contains("outside the vocabulary"));
    let beside = prepare(&ids[..200], VocabularyChoice::Bpe { size: 4096 }).unwrap();
    assert_eq!(beside.vocabulary().hash(), trained.hash());
}

#[test]
fn a_folder_of_token_ids_is_one_stream() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, ids: Range<u16>| {
        fs::write(folder.path().join(name), ids.flat_map(u16::to_le_bytes).collect::<Vec<_>>()).unwrap();
    };
    let prepare = |size| {
        let options = options(&folder.path().join(".cache"), VocabularyChoice::Bpe { size }, 10);
        Dataset::prepare(&Source::Path(folder.path().to_owned()), &options)
    };
    write("some_train_000002.bin", 100..150);
    write("some_train_000001.bin", 0..100);
    let all = prepare(200).unwrap();
    assert_eq!((all.training_tokens(), all.validation_tokens(), text_of(&all, &(99..101))), (135, 15, "99 100".into()));
    write("some_val_000000.bin", 150..180);
    let split = prepare(200).unwrap();
    assert_eq!((split.training_tokens(), split.validation_tokens()), (150, 30));
    let error = prepare(120).unwrap_err().to_string();
    assert!(error.contains("some_train_000002.bin: token 120 at position 20 is outside"), "{error}");
    fs::write(folder.path().join("notes.txt"), "text goes first").unwrap();
    assert!(prepare(300).unwrap().corpus().is_some());
}

#[test]
fn a_given_tokenizer_is_kept_with_the_tokens() {
    let folder = tempfile::tempdir().unwrap();
    let given = folder.path().join("given.json");
    let prepare = |text: &str| {
        Vocabulary::train([text].into_iter(), 265).unwrap().save(&given).unwrap();
        let options = options(folder.path(), VocabularyChoice::File(given.clone()), 0);
        Dataset::from_corpus(&lettered(3), &options).unwrap()
    };
    let (one, other) = (prepare("aaaa aaaa"), prepare("bbbb bbbb"));
    assert_ne!(one.hash(), other.hash());
    assert_eq!(Dataset::open_prepared(other.folder().unwrap()).unwrap().hash(), other.hash());
    assert!(other.validation(4, 1).unwrap().is_none());
    assert!(matches!(other.training(1000, 1, 0), Err(DataError::TooShort { .. })));
}

/// If ids are wider than the width with which they are read, every second value is nearly zero. That must be an error.
#[test]
fn ids_of_another_width_are_not_read_in_halves() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("ids.bin");
    let ids: Vec<u32> = (0..400).map(|i| i * 97 % 50_257).collect();
    let bytes = |width: TokenWidth| {
        let mut bytes = Vec::new();
        width.append(&ids, &mut bytes);
        bytes
    };
    let read = |size: usize, width: Option<TokenWidth>| {
        let options = DataOptions { width, ..options(folder.path(), VocabularyChoice::Bpe { size }, 0) };
        Dataset::prepare(&Source::Path(file.clone()), &options)
    };
    use TokenWidth::{U16, U32, U64};
    for (written, size, seems) in
        [(U32, 50_257, "of 4 bytes"), (U64, 50_257, "of 8 bytes"), (U64, 100_000, "of 8 bytes")]
    {
        fs::write(&file, bytes(written)).unwrap();
        let error = read(size, None).unwrap_err().to_string();
        assert!(error.contains(seems) && error.contains("data.token_width"), "{error}");
        let dataset = read(size, Some(written)).unwrap();
        assert_eq!((dataset.training_tokens(), dataset.largest_token()), (400, *ids.iter().max().unwrap()));
    }
    // The given width equals the width that the ids appear to have.
    for (written, size) in [(U16, 50_257), (U32, 100_000)] {
        fs::write(&file, bytes(written)).unwrap();
        assert_eq!(read(size, None).unwrap().training_tokens(), 400);
    }
    // Small ids are not mistaken for halves of larger ones.
    fs::write(&file, [1, 0].repeat(300)).unwrap();
    assert_eq!(read(65, None).unwrap().training_tokens(), 300);
    // An id that exceeds 32 bits is outside the vocabulary.
    fs::write(&file, (1u64 << 40).to_le_bytes().repeat(3)).unwrap();
    assert!(matches!(read(65, Some(U64)), Err(DataError::TokenOutside { .. })));
}

/// If several processes or threads need the same data at once, one of them prepares it and the others reuse the result.
#[test]
fn one_prepares_and_the_others_wait() {
    let folder = tempfile::tempdir().unwrap();
    let text: String = (0..3000).map(|i| format!("line {i} of a text\n")).collect();
    fs::write(folder.path().join("text.txt"), text).unwrap();
    let source = Source::Path(folder.path().join("text.txt"));
    let options = options(folder.path(), VocabularyChoice::Bpe { size: 300 }, 4);
    let hashes: Vec<String> = std::thread::scope(|scope| {
        let threads: Vec<_> =
            (0..6).map(|_| scope.spawn(|| Dataset::prepare(&source, &options).unwrap().hash().to_owned())).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(hashes.iter().all(|hash| *hash == hashes[0]));
    assert_eq!(fs::read_dir(&options.cache).unwrap().count(), 1);
}

/// Held-out data are validated as a whole: the last window is padded, and short examples share rows.
#[test]
fn all_held_out_tokens_are_validated() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        fs::write(folder.path().join(name), text).unwrap();
        folder.path().join(name)
    };
    let options = options(folder.path(), VocabularyChoice::Bytes, 0);
    let counted = |path: &Path, format, sequence, isolates| {
        let dataset = Dataset::held_out(path, format, &Vocabulary::bytes(), &options).unwrap();
        assert_eq!(dataset.training_tokens(), 0);
        let windows = dataset.padded_validation(sequence, isolates).unwrap().unwrap();
        let size = windows.count() * sequence;
        let (mut tokens, mut targets, mut starts) = (vec![1; size], vec![1; size], vec![1; size]);
        windows.fill_documents(0, &mut tokens, &mut targets, &mut starts).unwrap();
        let counted = targets.iter().filter(|&&target| target != crate::IGNORED).count();
        (windows.count(), counted, starts)
    };
    let text = file("a.txt", "abcdefghijk");
    assert_eq!(counted(&text, Format::Text, 4, false), (3, 10, vec![0; 12]));
    assert_eq!(counted(&text, Format::Text, 100, false).0, 1);
    // The end-of-text token of the bytes, 0, ends each of two documents. The first token after it is not a target.
    // Padding has the same id.
    let lines = file("b.jsonl", "{\"text\": \"abc\"}\n{\"text\": \"de\"}\n");
    assert_eq!(counted(&lines, Format::Text, 8, false), (1, 6, vec![0; 8]));
    assert_eq!(counted(&lines, Format::Text, 8, true), (1, 5, vec![0, 0, 0, 0, 4, 4, 4, 7]));
    // Three answers of two letters and the end of text.
    let line = "{\"prompt\": \"x\", \"completion\": \"yz\"}\n";
    let examples = file("c.jsonl", &line.repeat(3));
    let (windows, targets, _) = counted(&examples, Format::Prompt, 8, true);
    assert_eq!((windows, targets), (2, 9));
    let one = Dataset::held_out(&file("d.txt", "a"), Format::Text, &Vocabulary::bytes(), &options).unwrap();
    assert!(matches!(one.padded_validation(4, false), Err(DataError::TooShort { needed: 2, .. })));
}
