#pragma once
// Everything: the umbrella header.

#include "remat/apply.h"
#include "remat/checkpoint.h"
#include "remat/error.h"
#include "remat/hooks.h"
#include "remat/memory.h"
#include "remat/module.h"
#include "remat/options.h"
#include "remat/place.h"
#include "remat/plan.h"
#include "remat/policy.h"
#include "remat/report.h"
#include "remat/scope.h"
#include "remat/sequential.h"
#include "remat/state.h"
#include "remat/tiers.h"
#include "remat/version.h"
