/*
 * Faults that soft-RoCE never has, put between a program and the real libibverbs by LD_PRELOAD.
 *
 * RERAIL_INTERPOSE names a directory. For a device DEV, while these files are there:
 *
 *   fatal-DEV   the next read of an event gives DEVICE_FATAL; the file is removed
 *   cqerr-DEV   the same with CQ_ERR of its last completion queue
 *   eio-DEV     the same with EIO instead of an event
 *   hang-DEV    moving queue pairs to another state does not return
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static const char VERSION[] = "IBVERBS_1.1";

/* The completion queue of the event that was made up, if one was. */
static __thread struct ibv_cq *made_up;
/* The last completion queues that were made, one a context, in a ring. */
static struct {
	struct ibv_context *context;
	struct ibv_cq *cq;
} cqs[32];
static unsigned int cqs_made;

static struct ibv_cq *cq_of(struct ibv_context *context)
{
	unsigned int count = sizeof(cqs) / sizeof(cqs[0]);
	for (unsigned int back = 1; back <= count && back <= cqs_made; back++) {
		unsigned int at = (cqs_made - back) % count;
		if (cqs[at].context == context)
			return cqs[at].cq;
	}
	return NULL;
}

static void *real(const char *name)
{
	void *found = dlvsym(RTLD_NEXT, name, VERSION);
	if (!found) {
		fprintf(stderr, "interpose: libibverbs has no %s\n", name);
		abort();
	}
	return found;
}

static int path(char *to, size_t size, const char *what, struct ibv_context *context)
{
	const char *dir = getenv("RERAIL_INTERPOSE");
	if (!dir)
		return 0;
	snprintf(to, size, "%s/%s-%s", dir, what, context->device->name);
	return 1;
}

static int take(const char *what, struct ibv_context *context)
{
	char file[4096];
	return path(file, sizeof(file), what, context) && unlink(file) == 0;
}

struct ibv_cq *ibv_create_cq(struct ibv_context *context, int cqe, void *cq_context,
			     struct ibv_comp_channel *channel, int comp_vector)
{
	struct ibv_cq *(*create)(struct ibv_context *, int, void *, struct ibv_comp_channel *,
				 int) = real("ibv_create_cq");
	struct ibv_cq *cq = create(context, cqe, cq_context, channel, comp_vector);
	/* Each device is opened by a thread of its own. */
	unsigned int at = __atomic_fetch_add(&cqs_made, 1, __ATOMIC_SEQ_CST);
	at %= sizeof(cqs) / sizeof(cqs[0]);
	cqs[at].cq = cq;
	cqs[at].context = context;
	return cq;
}

int ibv_get_async_event(struct ibv_context *context, struct ibv_async_event *event)
{
	int (*get)(struct ibv_context *, struct ibv_async_event *) = real("ibv_get_async_event");
	if (take("fatal", context)) {
		event->event_type = IBV_EVENT_DEVICE_FATAL;
		event->element.cq = NULL;
		return 0;
	}
	struct ibv_cq *cq = cq_of(context);
	if (cq && take("cqerr", context)) {
		event->event_type = IBV_EVENT_CQ_ERR;
		event->element.cq = cq;
		made_up = cq;
		return 0;
	}
	if (take("eio", context)) {
		errno = EIO;
		return -1;
	}
	return get(context, event);
}

void ibv_ack_async_event(struct ibv_async_event *event)
{
	void (*ack)(struct ibv_async_event *) = real("ibv_ack_async_event");
	/* The kernel did not count it, and the library must not. */
	if (event->event_type == IBV_EVENT_CQ_ERR && event->element.cq == made_up) {
		made_up = NULL;
		return;
	}
	ack(event);
}

int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int attr_mask)
{
	int (*modify)(struct ibv_qp *, struct ibv_qp_attr *, int) = real("ibv_modify_qp");
	char file[4096];
	if (path(file, sizeof(file), "hang", qp->context)) {
		while (access(file, F_OK) == 0)
			usleep(10000);
	}
	return modify(qp, attr, attr_mask);
}
