/* A stand-in for libbaseRT: the functions that superfluidd calls, over a toy model.
 *
 * It proves that the calls fit the declarations, that sequences, blocks, locks and failures are handled as the public
 * header promises, and nothing about speed, numbers or GPUs. A token of the toy is a hash of all tokens before it; the
 * hash lives in the blocks, so a sequence that begins from the wrong blocks says something else. Whoever breaks a rule
 * of the header (two threads in one handle, a lock given back twice, a block freed while in use) ends the process.
 */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define PAGE 16
#define SPECIALS 3
#define VOCAB (256 + SPECIALS)
#define MOST_BLOCKS 4096
#define MOST_ENTRIES 512
#define MOST_PAGES 256

static const char *SPECIAL[SPECIALS] = {"<|endoftext|>", "<|im_start|>", "<|im_end|>"};
static const char *TEMPLATE =
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

typedef struct {
    uint32_t dim, n_layers, n_heads, n_kv_heads, head_dim, q_dim, kv_dim, ffn_dim, vocab_size, max_seq_len;
    float norm_eps, rope_theta;
    uint32_t sliding_window_pattern, sliding_window;
    float rope_local_theta;
    char architecture[32];
    char rest[1800]; /* what this program does not look at */
} Config;

typedef struct {
    uint32_t tokens[PAGE];
    uint64_t state[PAGE];
    int users;
} Block;

typedef struct {
    uint32_t *tokens;
    int pages, locks, locked; /* of the pages, the first so many are in use by whoever locked them */
    int blocks[MOST_PAGES];
    uint64_t used;
} Entry;

typedef struct {
    int blocks, max_context, max_batch, rows, prefix_cache;
    Block block[MOST_BLOCKS];
    Entry entry[MOST_ENTRIES];
    int entries, sequences;
    uint64_t clock;
    uint64_t row[256];
    pthread_mutex_t busy;
} Model;

typedef struct {
    Model *model;
    int length, pages;
    int blocks[MOST_PAGES];
} Sequence;

typedef struct {
    int matched_tokens, n_blocks;
    const int *blocks;
    uint64_t handle;
} Match;

static __thread char error_text[256];
static __thread int error_code;
static int paged, max_batch = 1, prefix_cache;
static int fail_code, fail_after = -1, live_models;

static void die(const char *why) {
    fprintf(stderr, "stand-in: %s\n", why);
    abort();
}

static int failed(int code, const char *text) {
    error_code = code;
    snprintf(error_text, sizeof error_text, "%s", text);
    return code;
}

static void enter(Model *model) {
    if (pthread_mutex_trylock(&model->busy)) die("two threads use one model");
}
static void leave(Model *model) { pthread_mutex_unlock(&model->busy); }

const char *baseRT_version_string(void) { const char *as = getenv("STANDIN_VERSION"); return as ? as : "0.1.6"; }
size_t baseRT_model_config_sizeof(void) { return getenv("STANDIN_SMALL") ? 8 : sizeof(Config); }
const char *baseRT_get_error(void) { return error_text; }
int baseRT_get_error_code(void) { return error_code; }
void baseRT_set_kv_bits(int bits) { if (bits != 0 && bits != 8 && bits != 16) die("bits of KV"); }
void baseRT_set_paged_kv(int on) { paged = on; }
void baseRT_set_max_batch_size(int n) { max_batch = n; }
void baseRT_set_prefix_cache(int on) { prefix_cache = on; }

void *baseRT_load_model(const char *path, const char *kernels, int max_context) {
    FILE *file = fopen(path, "rb");
    char magic[4] = {0};
    if (kernels) die("no kernels were asked for");
    if (!file) { failed(3, "no such model"); return NULL; }
    if (fread(magic, 1, 4, file) != 4 || memcmp(magic, "BASE", 4)) {
        fclose(file);
        failed(4, "this is no .base bundle");
        return NULL;
    }
    fclose(file);
    Model *model = calloc(1, sizeof(Model));
    pthread_mutex_init(&model->busy, NULL);
    model->max_context = max_context;
    model->max_batch = max_batch;
    model->prefix_cache = prefix_cache;
    model->blocks = max_batch * ((max_context + PAGE - 1) / PAGE);
    const char *as = getenv("STANDIN_BLOCKS");
    if (as) model->blocks = atoi(as);
    if (model->blocks > MOST_BLOCKS) model->blocks = MOST_BLOCKS;
    live_models++;
    return model;
}

void baseRT_free_model(void *handle) {
    Model *model = handle;
    if (model->sequences) die("sequences outlive their model");
    for (int i = 0; i < model->entries; i++) free(model->entry[i].tokens);
    free(model);
    live_models--;
}

Config baseRT_get_config(void *handle) {
    Model *model = handle;
    Config config;
    memset(&config, 0, sizeof config);
    config.dim = 64; config.n_layers = 2; config.n_heads = 4; config.n_kv_heads = 2; config.head_dim = 16;
    config.kv_dim = 32; config.vocab_size = VOCAB; config.max_seq_len = model->max_context;
    snprintf(config.architecture, sizeof config.architecture, "%s", getenv("STANDIN_ARCH") ? getenv("STANDIN_ARCH") : "toy");
    if (getenv("STANDIN_WINDOW")) config.sliding_window = 64;
    return config;
}
size_t baseRT_model_memory(void *model) { (void)model; return 3 << 20; }

int baseRT_encode(void *handle, const char *text, uint32_t *out, int most) {
    Model *model = handle;
    int count = 0;
    enter(model);
    while (*text && count < most) {
        int special = -1;
        for (int i = 0; i < SPECIALS; i++)
            if (!strncmp(text, SPECIAL[i], strlen(SPECIAL[i]))) special = i;
        out[count++] = special >= 0 ? 256u + (uint32_t)special : (uint8_t)*text;
        text += special >= 0 ? strlen(SPECIAL[special]) : 1;
    }
    leave(model);
    return count;
}

const char *baseRT_decode_token_static(void *model, uint32_t token) {
    static __thread char text[2];
    (void)model;
    if (token >= 256) return token < VOCAB ? SPECIAL[token - 256] : "";
    text[0] = (char)token;
    text[1] = 0;
    return text;
}
const char *baseRT_chat_template_jinja(void *model) { (void)model; return TEMPLATE; }
const char *baseRT_bos_token(void *model) { (void)model; return SPECIAL[1]; }
const char *baseRT_eos_token(void *model) { (void)model; return SPECIAL[2]; }
uint32_t baseRT_eos_token_id(void *model) { (void)model; return 258; }

static int take_block(Model *model) {
    for (int i = 0; i < model->blocks; i++)
        if (!model->block[i].users) { model->block[i].users = 1; return i; }
    return -1;
}
static void drop_block(Model *model, int block) {
    if (--model->block[block].users < 0) die("a block is given back twice");
}

void *baseRT_sequence_create(void *handle) {
    Model *model = handle;
    if (!paged) { failed(5, "no paged KV"); return NULL; }
    Sequence *sequence = calloc(1, sizeof(Sequence));
    sequence->model = model;
    model->sequences++;
    return sequence;
}
void baseRT_sequence_free(void *handle) {
    Sequence *sequence = handle;
    enter(sequence->model);
    for (int i = 0; i < sequence->pages; i++) drop_block(sequence->model, sequence->blocks[i]);
    sequence->model->sequences--;
    leave(sequence->model);
    free(sequence);
}

static int feed(Model *model, Sequence *sequence, const uint32_t *tokens, int count) {
    for (int i = 0; i < count; i++) {
        int page = sequence->length / PAGE, slot = sequence->length % PAGE;
        if (tokens[i] >= VOCAB) return failed(2, "no such token");
        if (sequence->length >= model->max_context) return failed(6, "the context is full");
        if (page == sequence->pages) {
            int block = take_block(model);
            if (block < 0) return failed(6, "the pool is full");
            sequence->blocks[sequence->pages++] = block;
        }
        Block *block = &model->block[sequence->blocks[page]];
        if (block->users > 1) die("a shared block is written to");
        int before = sequence->length - 1;
        uint64_t state = before < 0 ? 7 : model->block[sequence->blocks[before / PAGE]].state[before % PAGE];
        block->tokens[slot] = tokens[i];
        block->state[slot] = (state * 1000003u + tokens[i] + 1) & 0x1fffffffffffffffu;
        sequence->length++;
    }
    return 0;
}

int baseRT_batch_step_fused_logits(void *handle, void **sequences, int n, const uint32_t *tokens, const int *counts) {
    Model *model = handle;
    enter(model);
    int code = 0, at = 0;
    if (getenv("STANDIN_MICROSECONDS")) usleep((useconds_t)atoi(getenv("STANDIN_MICROSECONDS")));
    if (n < 1 || n > model->max_batch) code = failed(2, "more sequences than the largest batch");
    if (getenv("STANDIN_UNSUPPORTED")) code = failed(5, "no variable-length attention");
    for (int i = 0; i < n && !code; i++) {
        if (fail_after == i) { code = failed(fail_code, "it was told to fail"); fail_after = -1; break; }
        Sequence *sequence = sequences[i];
        if (sequence->model != model) die("a sequence of another model");
        code = feed(model, sequence, tokens + at, counts[i]);
        at += counts[i];
        if (!code) model->row[i] = model->block[sequence->blocks[(sequence->length - 1) / PAGE]].state[(sequence->length - 1) % PAGE];
    }
    model->rows = code ? 0 : n;
    leave(model);
    return code;
}

static uint16_t half(float value) { /* normal halves only */
    uint32_t bits;
    memcpy(&bits, &value, 4);
    int exponent = (int)((bits >> 23) & 255) - 127 + 15;
    if (exponent <= 0) return 0;
    return (uint16_t)(((bits >> 16) & 0x8000) | (uint32_t)exponent << 10 | ((bits >> 13) & 0x3ff));
}

int baseRT_read_batch_logits(void *handle, int n, void *out) {
    Model *model = handle;
    uint16_t *logits = out;
    if (n != model->rows) return -failed(2, "the step before had another size");
    for (int i = 0; i < n; i++) {
        uint64_t key = model->row[i];
        for (int token = 0; token < VOCAB; token++) {
            uint64_t word = (key ^ (uint64_t)token * 0x9e3779b97f4a7c15u) * 0xbf58476d1ce4e5b9u;
            logits[i * VOCAB + token] = half(0.5f + (float)((word >> 40) & 1023) / 512.0f);
        }
        key = (key ^ (key >> 29)) * 0xbf58476d1ce4e5b9u;
        int best = (key >> 17) % 97 == 0 ? 258 : 32 + (int)((key >> 33) % 95);
        logits[i * VOCAB + best] = half(9.0f);
    }
    return VOCAB;
}

static Entry *by_handle(Model *model, uint64_t handle) { return &model->entry[handle - 1]; }

Match baseRT_prefix_match(void *handle, const uint32_t *tokens, int n) {
    Model *model = handle;
    Match match = {0, 0, NULL, 0};
    Entry *found = NULL;
    enter(model);
    for (int i = 0; i < model->entries && model->prefix_cache; i++) {
        Entry *entry = &model->entry[i];
        int pages = 0;
        while (pages < entry->pages && (pages + 1) * PAGE < n &&
               !memcmp(entry->tokens + pages * PAGE, tokens + pages * PAGE, PAGE * sizeof(uint32_t)))
            pages++;
        if (pages > match.n_blocks) {
            match = (Match){pages * PAGE, pages, entry->blocks, (uint64_t)i + 1};
            found = entry;
        }
    }
    if (found) {
        for (int i = 0; i < match.n_blocks; i++) model->block[found->blocks[i]].users++;
        found->locks++;
        if (match.n_blocks > found->locked) found->locked = match.n_blocks;
        found->used = ++model->clock;
    }
    leave(model);
    return match;
}

int baseRT_sequence_seed_prefix(void *handle, const int *blocks, int n_blocks, int n_tokens) {
    Sequence *sequence = handle;
    if (sequence->length) return failed(2, "the sequence is not empty");
    if (n_tokens != n_blocks * PAGE) return failed(2, "not whole blocks");
    memcpy(sequence->blocks, blocks, (size_t)n_blocks * sizeof(int));
    sequence->pages = n_blocks;
    sequence->length = n_tokens;
    return 0;
}

int baseRT_prefix_insert(void *handle, const uint32_t *tokens, int n, void *of) {
    Model *model = handle;
    Sequence *sequence = of;
    int pages = n / PAGE;
    if (n > sequence->length) return failed(2, "more tokens than the sequence has");
    enter(model);
    if (pages && model->prefix_cache && model->entries < MOST_ENTRIES) {
        int known = 0;
        for (int i = 0; i < model->entries; i++)
            known |= model->entry[i].pages >= pages && !memcmp(model->entry[i].tokens, tokens, pages * PAGE * sizeof(uint32_t));
        if (!known) {
            Entry *entry = &model->entry[model->entries++];
            memset(entry, 0, sizeof *entry);
            entry->pages = pages;
            entry->tokens = malloc(pages * PAGE * sizeof(uint32_t));
            memcpy(entry->tokens, tokens, pages * PAGE * sizeof(uint32_t));
            memcpy(entry->blocks, sequence->blocks, pages * sizeof(int));
            for (int i = 0; i < pages; i++) model->block[entry->blocks[i]].users++;
            entry->used = ++model->clock;
        }
    }
    leave(model);
    return 0;
}

void baseRT_prefix_unlock(void *handle, uint64_t which) {
    if (!which) return;
    Entry *entry = by_handle(handle, which);
    if (--entry->locks < 0) die("a lock is given back twice");
    if (!entry->locks) entry->locked = 0;
}

int baseRT_prefix_evict(void *handle, int n) {
    Model *model = handle;
    int freed = 0;
    enter(model);
    while (freed < n) {
        Entry *oldest = NULL;
        for (int i = 0; i < model->entries; i++)
            if (model->entry[i].pages > model->entry[i].locked && (!oldest || model->entry[i].used < oldest->used))
                oldest = &model->entry[i];
        if (!oldest) break;
        for (; oldest->pages > oldest->locked; freed++) /* its place stays, for handles are places */
            drop_block(model, oldest->blocks[--oldest->pages]);
    }
    leave(model);
    return freed;
}

/* -- for tests alone ----------------------------------------------------------------------------------------------- */

void standin_fail(int code, int after) { fail_code = code; fail_after = after; }
int standin_models(void) { return live_models; }
int standin_blocks(void *handle) {
    Model *model = handle;
    int used = 0;
    for (int i = 0; i < model->blocks; i++) used += model->block[i].users > 0;
    return used;
}
