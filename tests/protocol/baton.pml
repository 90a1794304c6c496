/* The protocol of commits, retirement, shared files, rewinds, quarantine and forks.
 *
 * Writers read the head, restore the tip, stage a checkpoint, and create the next entry of the log only if it is not
 * there. Each of them can stop for good at any step, which is a death, or go on late, which is a zombie. An answer of
 * the store can get lost. What the store does is atomic: a file is there or not, an entry is created once.
 *
 * spin_checker.py compiles this file. -DWRITERS, -DCHECKPOINTS and -DENTRIES bound the space, -DREWINDS, -DDAMAGES and
 * -DFORK say what happens besides commits. Each mutation (-DM_...) breaks one rule; an assertion then fails.
 * -DTRACE replays the entries of a real log (trace.h) in place of the writers.
 */

#ifndef WRITERS
#define WRITERS 2
#endif
#ifndef CHECKPOINTS
#define CHECKPOINTS 4
#endif
#ifndef ENTRIES
#define ENTRIES 8
#endif
#ifndef REWINDS
#define REWINDS 0
#endif
#ifndef DAMAGES
#define DAMAGES 0
#endif
/* Numbers of checkpoints and entries. A real log has many. */
#ifdef WIDE
#define number short
#define NOBODY 32767
#else
#define number byte
#define NOBODY 255
#endif

/* The log: what each entry says of the head after it. */
number entries;            /* how many there are */
number base_at[ENTRIES];   /* number of the entry that last moved the tip */
number commits_at[ENTRIES];

/* The folded state of the newest entry. */
number base; number commits; number tip = NOBODY;

/* Checkpoints: folders of the home, each with data and a manifest. */
number folders;
number base_of[CHECKPOINTS];     /* in the folder's name */
number parent_of[CHECKPOINTS];   /* the checkpoint that it was trained from */
number entry_of[CHECKPOINTS];    /* that committed it; 0: none */
number retired_by[CHECKPOINTS];  /* entry that retires it; 0: none */
number inode[CHECKPOINTS];       /* hard links share one, and its damage */
bit data[CHECKPOINTS]; bit manifest[CHECKPOINTS];
bit retained[CHECKPOINTS]; bit quarantined[CHECKPOINTS];
bit read_whole[CHECKPOINTS];   /* as the log says */
bit damaged[CHECKPOINTS];      /* by inode */

byte rewinds; byte damages;

#define IS_THERE(c) (data[c] && manifest[c])
#define IS_DAMAGED(c) damaged[inode[c]]

/* What holds after each entry: all that is retained is there. Damage is no fault of the protocol. */
inline retained_are_whole()
{
	for (i_ : 0 .. CHECKPOINTS - 1) {
		assert(!retained[i_] || IS_THERE(i_));
	}
	i_ = 0;
}

/* The newest retained checkpoint that was committed before entry e. */
inline newest_before(e, found)
{
	found = NOBODY;
	for (i_ : 0 .. CHECKPOINTS - 1) {
		if
		:: retained[i_] && entry_of[i_] < e && (found == NOBODY || entry_of[i_] > entry_of[found]) -> found = i_
		:: else
		fi
	}
	i_ = 0;
}

inline append()
{
	base_at[entries] = base;
	commits_at[entries] = commits;
	entries++;
}

/* The entries. A writer has decided on the head of entry `seen`, and it is the newest. */

inline append_commit(c, restored)
{
#ifndef M_NO_BASE_CHECK
	assert(base_of[c] == base);             /* its base is the newest: nobody has moved the tip since */
#endif
	for (i_ : 0 .. CHECKPOINTS - 1) {       /* so no two commits have one base */
		assert(i_ == c || entry_of[i_] == 0 || base_of[i_] != base_of[c]);
	}
	i_ = 0;
	assert(entry_of[c] == 0);
	assert(parent_of[c] == tip);            /* it continues the run, and nothing that was rewound */
	entry_of[c] = entries;
	retained[c] = 1;
	if
	:: restored != NOBODY && retained[restored] -> read_whole[restored] = 1
	:: else
	fi;
	base = entries; commits++; tip = c;
	append();
	retained_are_whole();
}

/* Retires what retention does not keep: all but the tip, and the newest that was read whole. */
inline append_retire()
{
	newest_before(NOBODY, k_);
	assert(k_ == tip);
	k_ = NOBODY;
#ifndef M_RETIRE_READ
	for (i_ : 0 .. CHECKPOINTS - 1) {
		if
		:: retained[i_] && read_whole[i_] && (k_ == NOBODY || entry_of[i_] > entry_of[k_]) -> k_ = i_
		:: else
		fi
	}
#endif
	had_ = 0; has_ = 0;
	for (i_ : 0 .. CHECKPOINTS - 1) {
		had_ = had_ || (retained[i_] && read_whole[i_]);
		if
		:: retained[i_] && i_ != tip && i_ != k_ -> retained[i_] = 0; retired_by[i_] = entries
		:: else
		fi;
		has_ = has_ || (retained[i_] && read_whole[i_]);
	}
	assert(!had_ || has_);                  /* one that was read whole stays */
	i_ = 0; k_ = 0; had_ = 0; has_ = 0;
	append();
	retained_are_whole();
}

inline append_rewind(to)
{
	assert(retained[to]);
	for (i_ : 0 .. CHECKPOINTS - 1) {
		if
		:: retained[i_] && entry_of[i_] > entry_of[to] -> retained[i_] = 0; retired_by[i_] = entries
		:: else
		fi
	}
	i_ = 0;
#ifndef M_REWIND_KEEPS_BASE
	base = entries;
#endif
	tip = to;
	append();
	retained_are_whole();
}

inline append_quarantine(c)
{
	assert(c == tip);                       /* else what was committed on top of it is lost */
	retained[c] = 0; quarantined[c] = 1;
	newest_before(NOBODY, tip);
	base = entries;
	append();
	retained_are_whole();
}

#ifdef TRACE
/* A log keeps what its run file says, so which checkpoints it retires is read from it. */

inline replay_commit(c, on, parent)
{
	data[c] = 1; manifest[c] = 1; base_of[c] = on; parent_of[c] = parent;
	append_commit(c, NOBODY)
}

/* Damage that a second look finds in an older checkpoint: nothing was trained from it lately, so the base stays. */
inline replay_quarantine(c)
{
	if
	:: c == tip -> append_quarantine(c)
	:: else -> retained[c] = 0; quarantined[c] = 1; append()
	fi
}

inline replay_retired(c)
{
	assert(retained[c] && c != tip);
	retained[c] = 0; retired_by[c] = entries
}

/* The log says after the next commit what was deleted, so two commits lie between at least. */
inline replay_deleted(c)
{
	assert(retired_by[c] != 0 && commits >= commits_at[retired_by[c]] + 2);
	data[c] = 0; manifest[c] = 0
}

init {
	number i_; number k_;
	atomic {
#include "trace.h"
	}
}
#else

/* Delete a folder, file by file. */
inline delete(c)
{
#ifdef M_SHARED_BY_NAME
	/* One object for all that share it. */
	atomic {
		for (i_ : 0 .. CHECKPOINTS - 1) {
			data[i_] = data[i_] && inode[i_] != inode[c]
		}
		i_ = 0
	};
#endif
	data[c] = 0;
	manifest[c] = 0
}

/* Read the newest entry. Entries never change, so it is found by probing, whatever HINT says. */
inline read_head()
{
	d_step { seen = entries - 1; seen_base = base; seen_tip = tip }
}

proctype Writer(byte me)
{
	byte seen, seen_base, seen_tip, mine, restored, warm, c, i_, k_;
	bit had_, has_, swept, lost;
	byte listed;
	warm = NOBODY; mine = NOBODY;

start:
	restored = NOBODY;
	read_head();
	if
	:: seen_tip == NOBODY -> goto stop
	:: else
	fi;
	/* Restore the tip, unless the state in memory is it. */
	if
	:: warm == seen_tip -> goto train
	:: else
	fi;
	if
	:: atomic { !IS_THERE(seen_tip) ->
		/* Deleted meanwhile, which takes two commits, or quarantined by another. */
		assert(quarantined[seen_tip] || retired_by[seen_tip] != 0);
		assert(quarantined[seen_tip] || commits >= commits_at[seen] + 2);
		goto start }
#ifdef M_RESTORE_UNREAD
	:: atomic { IS_THERE(seen_tip) ->
#else
	:: atomic { IS_THERE(seen_tip) && IS_DAMAGED(seen_tip) -> goto quarantine }
	:: atomic { IS_THERE(seen_tip) && !IS_DAMAGED(seen_tip) ->
#endif
		assert(!IS_DAMAGED(seen_tip));
		restored = seen_tip; warm = seen_tip }
	fi;

train:
	if
	:: atomic { folders < CHECKPOINTS && entries < ENTRIES - 1 ->
		mine = folders; folders++; base_of[mine] = seen_base; parent_of[mine] = warm }
	:: atomic { rewinds < REWINDS && entries < ENTRIES - 1 -> rewinds++; goto rewind }
	:: folders == CHECKPOINTS || entries >= ENTRIES - 1 -> goto stop
	fi;

	/* Stage: the data, linked to the file of the checkpoint before or written, where that file is gone or has other
	   bytes; then the manifest. */
	if
	:: atomic { data[warm] ->
		data[mine] = 1;
#ifdef M_LINK_UNREAD
		inode[mine] = inode[warm];
		assert(!IS_DAMAGED(mine))       /* what is shared was compared with the bytes in memory */
#else
		inode[mine] = (IS_DAMAGED(warm) -> mine : inode[warm])
#endif
		}
	:: atomic { data[mine] = 1; inode[mine] = mine }
	fi;
	manifest[mine] = 1;

commit:
#ifndef M_NO_BASE_CHECK
	if
	:: seen_base != base_of[mine] -> goto stale
	:: else
	fi;
#endif
	if
	:: atomic { seen + 1 == entries ->
		append_commit(mine, restored);
		if
		:: lost = 0
		:: lost = 1                     /* the answer */
		fi }
#ifdef M_OVERWRITE
	:: atomic { seen + 1 < entries ->       /* replaces what another has created */
		entries = seen + 1; base = base_at[seen]; commits = commits_at[seen];
		append_commit(mine, restored); lost = 0 }
#else
	:: seen + 1 < entries -> lost = 1       /* refused */
#endif
	fi;
	if
	:: lost ->
		lost = 0;
		read_head();
#ifndef M_LOST_ANSWER
		/* A refused create may be our own. */
		if
		:: entry_of[mine] != 0 && entry_of[mine] <= seen -> goto committed
		:: else
		fi;
#endif
		goto commit
	:: else
	fi;

committed:
	warm = mine;
	d_step { seen = entry_of[mine]; seen_base = seen; seen_tip = mine; restored = NOBODY };
#ifdef M_DELETE_BEFORE_LOG
	c = 0;
	do
	:: c < CHECKPOINTS -> if
		:: retained[c] && c != tip && !read_whole[c] -> delete(c)
		:: else
		fi; c++
	:: else -> break
	od;
#endif
	/* Retire, unless entries run out. Refused: decide again on the newest head. */
	if
	:: atomic { entries < ENTRIES - 1 -> append_retire() }
	:: entries >= ENTRIES - 1
	fi;
	/* Delete what was retired two commits before our entry. */
	c = 0;
	do
	:: c < CHECKPOINTS ->
		if
#ifdef M_DELETE_AT_ONCE
		:: retired_by[c] != 0 && data[c] -> delete(c)
#else
		:: retired_by[c] != 0 && retired_by[c] < seen && commits_at[seen] >= commits_at[retired_by[c]] + 2 && (data[c] || manifest[c]) -> delete(c)
#endif
		:: else
		fi;
		c++
	:: else -> break
	od;
	/* Sweep once: folders that no entry names and whose base is no longer current. */
	if
	:: !swept ->
#ifdef M_SWEEP_HEAD_FIRST
		read_head(); listed = folders;
#else
		listed = folders; read_head();
#endif
		c = 0;
		do
		:: c < listed ->
			if
#ifdef M_SWEEP_ANY_BASE
			:: !(entry_of[c] != 0 && entry_of[c] <= seen) && (data[c] || manifest[c]) -> delete(c)
#else
			:: !(entry_of[c] != 0 && entry_of[c] <= seen) && base_of[c] != seen_base && (data[c] || manifest[c]) -> delete(c)
#endif
			:: else
			fi;
			c++
		:: else -> break
		od;
		swept = 1;
		d_step { seen = entry_of[mine]; seen_base = seen; seen_tip = mine }
	:: else
	fi;
	/* The next segment, from memory; or another start. */
	if
	:: goto train
	:: warm = NOBODY; goto start
	fi;

stale:
	assert(base != base_of[mine]);          /* housekeeping makes nobody stale */
#ifdef M_LOST_ANSWER
	delete(mine);
#else
	assert(entry_of[mine] == 0);            /* what is committed is not withdrawn */
	delete(mine);
#endif
	warm = NOBODY;
	goto start;

rewind:
	/* Back to any retained checkpoint, if nobody has moved the tip. */
	c = 0;
	do
	:: c < CHECKPOINTS - 1 -> c++
	:: break
	od;
	if
	:: atomic { seen + 1 == entries && retained[c] && c != tip ->
		append_rewind(c);
		/* The last work on top of the old tip can never be committed. */
		warm = NOBODY }
	:: seen + 1 < entries || !retained[c] || c == tip -> skip
	fi;
	goto start;

quarantine:
	if
	:: atomic { seen + 1 == entries && entries < ENTRIES - 1 -> append_quarantine(seen_tip) }
#ifdef M_QUARANTINE_ANY
	:: atomic { seen + 1 < entries && entries < ENTRIES - 1 && retained[seen_tip] -> append_quarantine(seen_tip) }
#endif
	:: seen + 1 < entries -> skip           /* decide again */
	:: entries >= ENTRIES - 1 -> goto stop
	fi;
	goto start;

stop:
	skip
}

#if DAMAGES > 0
/* A disk that loses bits. The first checkpoint of the run is spared, so that one remains. */
active proctype Disk()
{
	byte c;
	do
	:: damages < DAMAGES ->
		c = 1;
		do
		:: c < CHECKPOINTS - 1 -> c++
		:: break
		od;
		atomic { damages++; if
		:: inode[c] != 0 && data[c] -> damaged[inode[c]] = 1
		:: else
		fi }
	:: damages == DAMAGES -> break
	od
}
#endif

#ifdef FORK
/* Copies a checkpoint into another run while it may be retired. A second process finishes what the first has left. */
bit fork_data, fork_manifest, fork_committed;

active proctype Fork()
{
	byte seen, seen_base, seen_tip;
again:
	read_head();
	if
	:: seen_tip == NOBODY -> goto stop
	:: else
	fi;
#ifdef M_FORK_MANIFEST_FIRST
	fork_manifest = 1;
#endif
	if
	:: atomic { data[seen_tip] -> fork_data = 1 }
	:: atomic { !data[seen_tip] -> fork_data = 0; fork_manifest = 0; goto again }
	fi;
	fork_manifest = 1;
	atomic { if
	:: !fork_committed -> assert(fork_data && fork_manifest); fork_committed = 1
	:: else
	fi };
stop:
	skip
}

active proctype Finisher()
{
	/* The manifest is written last, so what has one is complete. */
end_nothing_to_finish:
	atomic { fork_manifest && !fork_committed -> assert(fork_data); fork_committed = 1 }
}
#endif

init {
	byte i_, k_; bit had_, has_;
	atomic {
		for (k_ : 0 .. CHECKPOINTS - 1) { inode[k_] = k_ }
		k_ = 0;
		append();                       /* the origin */
		folders = 1; data[0] = 1; manifest[0] = 1;
		parent_of[0] = NOBODY;
		append_commit(0, NOBODY);
		for (k_ : 1 .. WRITERS) { run Writer(k_) }
	}
}
#endif
